"""How ranks reach each other: which transport a pool uses, and why."""

from __future__ import annotations

import dataclasses
import importlib.util
from types import ModuleType
from typing import Literal, get_args

from jax_b12x import _native
from jax_b12x.comm.coordination import hosts_of
from jax_b12x.comm.topology import Topology

TransportName = Literal["peer", "ipc", "host", "xla"]
TRANSPORTS: tuple[TransportName, ...] = get_args(TransportName)


class TransportError(RuntimeError):
    """A transport that was asked for by name cannot be used."""


@dataclasses.dataclass(frozen=True)
class Transport:
    """A choice of transport.

    Attributes:
      name: its name.
      reason: why XLA's collectives are used, when ``name`` is ``"xla"`` and nobody asked for it.
    """

    name: TransportName
    reason: str = ""

    def extension(self) -> ModuleType:
        """Returns the extension that has its channels."""
        if self.name == "host":
            return _native.host()
        extension = _native.cuda()
        if extension is None:  # choose() has looked
            raise TransportError(f"transport={self.name!r} needs the CUDA half of jax_b12x")
        return extension


def choose(topology: Topology, asked: TransportName | None) -> Transport:
    """Returns the transport for ``topology``.

    Args:
      topology: the ranks.
      asked: a transport's name, or ``None`` to take the best that works.

    Raises:
      ValueError: there is no transport of that name.
      TransportError: the transport that was asked for cannot be used.
    """
    if asked is not None and asked not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {asked!r}")
    if asked == "xla":
        return Transport("xla")
    natural, obstacle = _natural(topology)
    if asked is None:
        return Transport("xla", obstacle) if obstacle else Transport(natural)
    if asked != natural:
        raise TransportError(
            f"transport={asked!r} cannot serve this mesh ({_describe(topology)}); it would be "
            f"{natural!r}"
        )
    if obstacle:
        raise TransportError(f"transport={asked!r} cannot be used: {obstacle}")
    return Transport(natural)


def _describe(topology: Topology) -> str:
    return (
        f"{len(topology.places)} {topology.platform} devices of {len(topology.processes)} "
        "process(es)"
    )


def _natural(topology: Topology) -> tuple[TransportName, str]:
    """Returns the transport that fits the devices, and what stands in its way, if anything."""
    several = len(topology.processes) > 1
    if topology.platform == "cpu":
        return "host", "the mesh spans several processes' CPU devices" if several else ""
    if topology.platform not in ("gpu", "cuda"):
        return "xla", f"there are no channels for the platform {topology.platform!r}"
    name: TransportName = "ipc" if several else "peer"
    extension = _native.cuda()
    if extension is None:
        return name, "jax_b12x was built without its CUDA half"
    if name == "peer":
        ordinals = [place.ordinal for place in topology.places]
        return name, str(extension.peer_obstacle(ordinals))
    if importlib.util.find_spec("cuda.bindings") is None:
        return name, "cuda-python is missing (`pip install jax_b12x[cuda]`)"
    hosts = hosts_of(topology.processes)
    if len(hosts) > 1:
        return name, f"its processes are on {len(hosts)} hosts, or in containers apart"
    return name, ""
