"""Where the arrays of loaded experts go: one device, or experts split over a mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


class Placement:
    """What ``load_experts`` makes of its argument ``device``."""

    def __init__(self, device: jax.Device | Sharding | None) -> None:
        """Takes a device, a sharding for arrays whose first axis is experts, or neither.

        Raises:
          TypeError: it is something else.
          ValueError: it splits another axis than the first.
        """
        self._experts = self._scalars = device
        if isinstance(device, NamedSharding):
            first, *rest = (*device.spec, None)
            if any(names for names in rest):
                raise ValueError(
                    f"device is {device}; a sharding of experts can split the first axis only, as "
                    f"PartitionSpec({first!r}) does"
                )
            # Arrays have one axis to three: a spec of one entry fits them all.
            self._experts = NamedSharding(
                device.mesh, PartitionSpec(first), memory_kind=device.memory_kind
            )
            self._scalars = NamedSharding(
                device.mesh, PartitionSpec(), memory_kind=device.memory_kind
            )
        elif isinstance(device, Sharding):
            if not device.is_fully_replicated:
                raise ValueError(
                    f"device is {device}; to split experts over devices it must be a NamedSharding"
                )
        elif device is not None and not isinstance(device, jax.Device):
            raise TypeError(
                f"device is of type {type(device).__name__}; it must be a jax.Device, or a "
                "jax.sharding.Sharding for every array whose first axis is experts"
            )

    def check(self, num_experts: int) -> None:
        """Checks that experts can be split so.

        Raises:
          ValueError: they cannot.
        """
        if isinstance(self._experts, Sharding):
            try:
                self._experts.shard_shape((num_experts,))
            except ValueError:
                raise ValueError(
                    f"device is {self._experts}; {num_experts} experts do not split evenly so"
                ) from None

    def put(self, value: Any) -> jax.Array:
        """Returns a host array where it belongs."""
        array: jax.Array = jax.device_put(value, self._experts if value.ndim else self._scalars)
        return array
