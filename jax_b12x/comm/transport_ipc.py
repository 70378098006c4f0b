"""One process a GPU: how ranks map each other's channels, by CUDA IPC.

A channel's memory is offered when the program that leases it is made, and mapped before the program
first runs. Ranks may make and run their programs in different orders, so a channel has a name that
does not depend on order: pool, lane, program, call site, bytes, and a generation that counts how
often this name came up before. Programs of one pool that communicate at all must differ in one of
these; a rank that finds no offer under the name says so after the pool's timeout.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from jax_b12x.comm.coordination import coordination
from jax_b12x.comm.topology import Place, Topology

_HANDLE_BYTES = 64
# How often a pool of a name was opened in this process: alike in all processes, since they open and
# close their pools together.
_openings: collections.Counter[str] = collections.Counter()


class IpcError(RuntimeError):
    """A peer's memory cannot be mapped."""


@dataclasses.dataclass(frozen=True)
class _Import:
    ordinal: int
    address: int


class IpcExchange:
    """What one pool offers to its peers in other processes, and has mapped of theirs.

    Args:
      pool: the pool's name.
      topology: its ranks.
      timeout: seconds to wait for a peer's offer.
      by_lane: whether channels belong to lanes, so that their names leave the program out.
      cuda: the CUDA runtime of cuda-python; for tests.
    """

    def __init__(
        self, pool: str, topology: Topology, timeout: float, *, by_lane: bool, cuda: Any = None
    ):
        self._prefix = f"b12x/ipc/{pool}/{_openings[pool]}"
        _openings[pool] += 1
        self._pool = pool
        self._topology = topology
        self._timeout = timeout
        self._by_lane = by_lane
        self._cuda = cuda if cuda is not None else _Cuda()
        self._lock = threading.Lock()
        self._generations: collections.Counter[str] = collections.Counter()
        self._names: dict[int, str] = {}
        self._imports: dict[tuple[int, int], list[_Import]] = {}

    def publish(
        self,
        channel: int,
        op: str,
        program: str,
        site: int,
        lane: str,
        size: int,
        slabs: Sequence[tuple[int, int]],
    ) -> None:
        """Offers a channel's memory, ``(ordinal, address)`` for each device of this process."""
        owner = f"{lane}" if self._by_lane else f"{lane}/{program}/{site}/{op}"
        base = f"{owner}/{size}"
        with self._lock:
            name = f"{base}/{self._generations[base]}"
            self._generations[base] += 1
            self._names[channel] = name
        client, _ = coordination()
        for place in self._local():
            for ordinal, address in slabs:
                if ordinal == place.ordinal:
                    handle = self._cuda.export(ordinal, address)
                    client.key_value_set(self._key(name, place), handle.hex())

    def connect(self, channel: int) -> list[tuple[int, int, int]]:
        """Maps the peers' memory of a channel: ``(ordinal, rank, address)`` for each.

        Raises:
          IpcError: a peer did not offer its memory in time, or it cannot be mapped.
        """
        client, _ = coordination()
        name = self._names[channel]
        found = []
        for mine in self._local():
            for peer in self._topology.places:
                if peer.local or peer.group != mine.group:
                    continue
                try:
                    handle = client.blocking_key_value_get(
                        self._key(name, peer), max(1, round(self._timeout * 1000))
                    )
                except Exception as error:
                    raise IpcError(
                        f"pool {self._pool!r}, channel {channel} ({name}): rank {peer.rank} did "
                        f"not offer its memory within the timeout of {self._timeout:g} s; every "
                        "rank must make the same programs"
                    ) from error
                address = self._cuda.open(mine.ordinal, bytes.fromhex(handle))
                with self._lock:
                    imports = self._imports.setdefault((channel, mine.rank), [])
                    imports.append(_Import(mine.ordinal, address))
                found.append((mine.ordinal, peer.rank, address))
        return found

    def close(self, channel: int, rank: int) -> None:
        """Unmaps what a rank of this process has of a channel.

        Raises:
          ExceptionGroup: mappings could not be closed; all others were.
        """
        with self._lock:
            imports = self._imports.pop((channel, rank), [])
        errors = []
        for each in imports:
            try:
                self._cuda.close(each.ordinal, each.address)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"unmapping channel {channel} on rank {rank}", errors)

    def _local(self) -> list[Place]:
        return [place for place in self._topology.places if place.local]

    def _key(self, name: str, place: Place) -> str:
        return f"{self._prefix}/{name}/{place.group}/{place.rank}"


class _Cuda:
    """CUDA IPC through cuda-python. Handles travel as their 64 bytes."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._runtime = runtime

    def export(self, ordinal: int, address: int) -> bytes:
        with self._device(ordinal):
            handle = self._check(self._runtime.cudaIpcGetMemHandle(address))
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)

    def open(self, ordinal: int, data: bytes) -> int:
        handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(handle.getPtr()), data, _HANDLE_BYTES)
        lazily = self._runtime.cudaIpcMemLazyEnablePeerAccess
        with self._device(ordinal):
            return int(self._check(self._runtime.cudaIpcOpenMemHandle(handle, lazily)))

    def close(self, ordinal: int, address: int) -> None:
        with self._device(ordinal):
            self._check(self._runtime.cudaIpcCloseMemHandle(address))

    def _device(self, ordinal: int) -> _Device:
        return _Device(self, ordinal)

    def _check(self, result: Any) -> Any:
        error, *values = result if isinstance(result, tuple) else (result,)
        if int(error) != 0:
            _, text = self._runtime.cudaGetErrorString(error)
            self._runtime.cudaGetLastError()
            raise IpcError(f"CUDA: {text.decode() if isinstance(text, bytes) else text}")
        return values[0] if values else None


class _Device:
    """Makes a device current, and the old one again."""

    def __init__(self, cuda: _Cuda, ordinal: int):
        self._cuda = cuda
        self._ordinal = ordinal
        self._before = 0

    def __enter__(self) -> None:
        runtime = self._cuda._runtime
        self._before = self._cuda._check(runtime.cudaGetDevice())
        self._cuda._check(runtime.cudaSetDevice(self._ordinal))

    def __exit__(self, *_: object) -> None:
        self._cuda._runtime.cudaSetDevice(self._before)
