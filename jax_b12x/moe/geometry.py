"""What a planner asks of a platform: can it run a path, and with which launch parameters."""

from __future__ import annotations

import dataclasses

from jax_b12x.capability import DeviceCapability
from jax_b12x.moe.recipe import Activation, Recipe, WeightFormat
from jax_b12x.moe.weights import WeightLayout

# Columns that share one block scale.
BLOCK: dict[WeightFormat, int] = {"nvfp4": 16, "mxfp4": 32}


@dataclasses.dataclass(frozen=True)
class Request:
    """The static facts of one MoE call; see :func:`jax_b12x.moe.plan.plan` for the fields."""

    recipe: Recipe
    weight_format: WeightFormat
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: str
    activation: Activation
    device: DeviceCapability


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a path is launched.

    Attributes:
      parameters: launch parameters by name, in a fixed order; they become FFI attributes.
      scratch_bytes: device scratch, an extra result of the call.
      weight_layout: the layout that the weights must have.
      reasons: what people should know about the choice, a sentence each.
    """

    parameters: tuple[tuple[str, int], ...] = ()
    scratch_bytes: int = 0
    weight_layout: WeightLayout = "checkpoint"
    reasons: tuple[str, ...] = ()
