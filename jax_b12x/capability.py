"""What one device can do, as a value that a plan can be made from and printed with."""

from __future__ import annotations

import dataclasses
from typing import Literal

Platform = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class DeviceCapability:
    """The facts about a device that a launch plan depends on; hashable.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      sm: compute capability times ten (90 for Hopper); 0 on CPU.
      sm_count: streaming multiprocessors; 0 on CPU.
      cooperative_launch: whether a grid can be launched that is resident as a whole, or not at all.
      shared_memory_bytes: the most shared memory that one block may ask for; 0 on CPU.
      l2_bytes: size of the L2 cache; 0 on CPU.
      name: the device's name, for people.
    """

    platform: Platform
    sm: int = 0
    sm_count: int = 0
    cooperative_launch: bool = False
    shared_memory_bytes: int = 0
    l2_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.platform not in ("cpu", "cuda"):
            raise ValueError(f"platform is {self.platform!r}; it must be 'cpu' or 'cuda'")

    def __str__(self) -> str:
        """Returns the facts in one line."""
        if self.platform == "cpu":
            return self.name or "CPU"
        cooperative = "cooperative launch" if self.cooperative_launch else "no cooperative launch"
        return f"{self.name or 'GPU'} (sm_{self.sm}, {self.sm_count} SMs, {cooperative})"


CPU = DeviceCapability("cpu")
