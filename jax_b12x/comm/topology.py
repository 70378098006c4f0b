"""Where each device stands: groups and ranks along one axis of a mesh, or several."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import jax
import numpy as np
from jax.sharding import Mesh

MAX_WORLD_SIZE = 16
# Of a layout, for people; what is behind it is in the digest alone.
_LAYOUT_CHARACTERS = 60


@dataclasses.dataclass(frozen=True)
class Place:
    """A device of the mesh.

    Attributes:
      device: the device.
      group: which of the groups side by side it is in.
      rank: its position along the axis.
    """

    device: jax.Device
    group: int
    rank: int

    @property
    def local(self) -> bool:
        """Whether the device belongs to this process."""
        return bool(self.device.process_index == jax.process_index(self.device.client))

    @property
    def ordinal(self) -> int:
        """The number that FFI handlers see of the device."""
        ordinal = getattr(self.device, "local_hardware_id", None)
        return int(self.device.id if ordinal is None else ordinal)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The ranks of a pool.

    Attributes:
      mesh: the mesh.
      axes: the axis names that a collective runs over; the last one varies fastest.
      world_size: the ranks of a group.
      places: every device, in the mesh's order.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    world_size: int
    places: tuple[Place, ...]

    @property
    def num_groups(self) -> int:
        """Groups side by side."""
        return len(self.places) // self.world_size

    @functools.cached_property
    def layout(self) -> str:
        """Which device of the mesh has which rank of which group: equal where all of that is.

        Groups of devices in rank order, such as ``"0 1 | 2 3"``, and a digest of the whole that
        knows the mesh's order of devices as well. Devices are counted within the mesh by their ids,
        so that a program may be exported and run on other devices in the same places.
        """
        ids = sorted(place.device.id for place in self.places)
        whole = [(ids.index(each.device.id), each.group, each.rank) for each in self.places]
        groups: list[list[str]] = [[""] * self.world_size for _ in range(self.num_groups)]
        for device, group, rank in whole:
            groups[group][rank] = str(device)
        shown = " | ".join(map(" ".join, groups))
        if len(shown) > _LAYOUT_CHARACTERS:
            shown = f"{shown[:_LAYOUT_CHARACTERS]}..."
        return f"{shown} #{hashlib.sha256(repr(whole).encode()).hexdigest()[:12]}"

    @property
    def platform(self) -> str:
        """The platform of the devices: ``"cpu"``, ``"gpu"`` or another."""
        return str(self.places[0].device.platform)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that have a device in the mesh."""
        return tuple(sorted({place.device.process_index for place in self.places}))

    @classmethod
    def of(cls, mesh: Mesh, axis: str | tuple[str, ...]) -> Topology:
        """Returns the ranks of ``mesh`` along ``axis``.

        Raises:
          TypeError: ``mesh`` is none, or ``axis`` is no name and no tuple of names.
          ValueError: the mesh lacks the axis, or it has too many ranks.
        """
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh")
        axes = (axis,) if isinstance(axis, str) else axis
        if not isinstance(axes, (tuple, list)) or not all(isinstance(name, str) for name in axes):
            raise TypeError(
                f"axis must be the name of an axis of the mesh {mesh.axis_names}, or a tuple of "
                f"names, not {axis!r}"
            )
        axes = tuple(axes)
        if len(set(axes)) < len(axes):
            raise ValueError(f"axis={axis!r} names an axis twice")
        missing = [name for name in axes if name not in mesh.axis_names]
        if not axes or missing:
            raise ValueError(f"axis must name axes of the mesh {mesh.axis_names}, not {axis!r}")
        world_size = math.prod(mesh.shape[name] for name in axes)
        if world_size > MAX_WORLD_SIZE:
            raise ValueError(
                f"axis={axis!r} has {world_size} ranks; a channel serves 1 to {MAX_WORLD_SIZE}"
            )
        others = [name for name in mesh.axis_names if name not in axes]
        order = [mesh.axis_names.index(name) for name in (*others, *axes)]
        grid = np.transpose(mesh.devices, order).reshape(-1, world_size)
        places = {
            device: Place(device, group, rank)
            for group, row in enumerate(grid)
            for rank, device in enumerate(row)
        }
        return cls(mesh, axes, world_size, tuple(places[device] for device in mesh.devices.flat))
