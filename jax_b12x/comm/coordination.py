"""The processes of a mesh, as participants of a teardown and of the exchange of addresses."""

from __future__ import annotations

import itertools
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

from jax_b12x.comm.teardown import Group, LocalGroup
from jax_b12x.comm.topology import Topology

BARRIER_TIMEOUT_S = 60.0


def coordination() -> tuple[Any, int]:
    """Returns the client of ``jax.distributed``'s coordination service and this process's number.

    JAX has no public name for the client; this is the one place that knows where it is. No backend
    is started.

    Raises:
      RuntimeError: ``jax.distributed.initialize`` was not called.
    """
    from jax._src import distributed

    state = distributed.global_state
    if state.client is None:
        raise RuntimeError("a mesh of several processes needs jax.distributed.initialize()")
    return state.client, state.process_id


def hosts_of(processes: Sequence[int]) -> set[str]:
    """Returns the hosts that the processes run on, each process in an IPC namespace of it.

    Every one of them asks.
    """
    client, process = coordination()
    prefix = "b12x/host"
    client.key_value_set(f"{prefix}/{process}", _host(), allow_overwrite=True)
    wait_ms = round(BARRIER_TIMEOUT_S * 1000)
    return {client.blocking_key_value_get(f"{prefix}/{each}", wait_ms) for each in processes}


def _host() -> str:
    """Names this boot of this machine and the IPC namespace in it, or at least the machine."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/ipc')}"
    except OSError:
        return platform.node()


class CoordinatedGroup:
    """Participants in several processes, through the key-value store of ``jax.distributed``.

    Args:
      scope: what the barriers are for; all participants name it alike, and never twice.
      processes: the processes that take part.
      timeout: seconds that a barrier waits for all of them; BARRIER_TIMEOUT_S by default.
    """

    def __init__(self, scope: str, processes: tuple[int, ...], timeout: float | None = None):
        self._scope = f"b12x/{scope}"
        self._processes = processes
        self._timeout_ms = round((BARRIER_TIMEOUT_S if timeout is None else timeout) * 1000)

    def barrier(self, name: str, note: str) -> list[str]:
        """Waits for all participants and returns their notes that are not empty."""
        client, process = coordination()
        prefix = f"{self._scope}/{name}"
        if note:
            client.key_value_set(f"{prefix}/note/{process}", note)
        client.wait_at_barrier(prefix, self._timeout_ms, list(self._processes))
        return [text for _, text in client.key_value_dir_get(f"{prefix}/note/")]


def make_group(topology: Topology) -> Callable[[str], Group]:
    """Returns a function that makes the group for each teardown in turn, given a word for it."""
    processes = topology.processes
    if len(processes) == 1:
        return lambda what: LocalGroup()
    numbers = itertools.count()
    return lambda what: CoordinatedGroup(f"{what}/{next(numbers)}", processes)
