"""Launch plans: the frozen, hashable decision of how one MoE call runs, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_b12x.moe.recipe import Activation, RecipeName, WeightFormat
from jax_b12x.moe.weights import WeightLayout

Implementation = Literal["fused", "split", "dynamic", "reference"]
Overlap = Literal["concurrent", "pre_resident", "none"]


@dataclasses.dataclass(frozen=True)
class MoePlan:
    """How one MoE call with static shapes is launched.

    Attributes:
      recipe: the numeric contract.
      weight_format: the format of the weights that it reads.
      implementation: ``fused`` (one launch over a resident grid), ``split`` (two barrier-free launches),
        ``dynamic`` (sort by expert, grouped products) or ``reference`` (plain ``jnp``).
      platform: ``"cpu"`` or ``"cuda"``.
      num_tokens: rows of ``x``.
      hidden: columns of ``x``.
      intermediate: columns between the two products.
      num_experts: experts on this device.
      top_k: routes a token.
      dtype: the name of ``x``'s dtype.
      activation: the activation between the two products.
      weight_layout: the layout that the weights must have (``ExpertWeights.prepare`` makes it).
      overlap: what auxiliary-stream work may do beside it: ``concurrent``, ``pre_resident``, ``none``.
      scratch_bytes: device scratch, passed as an extra result.
      geometry: launch parameters by name, in a fixed order.
      reasons: why, a sentence each.
    """

    recipe: RecipeName
    weight_format: WeightFormat
    implementation: Implementation
    platform: str
    num_tokens: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    dtype: str
    activation: Activation
    weight_layout: WeightLayout
    overlap: Overlap
    scratch_bytes: int
    geometry: tuple[tuple[str, int], ...] = ()
    reasons: tuple[str, ...] = ()
