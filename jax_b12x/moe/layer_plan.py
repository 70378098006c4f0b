"""How an MoE layer is launched: its routed experts' plan, and what the shared expert may overlap.

Pure, from static facts to a decision, like :mod:`jax_b12x.moe.planner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax.typing import DTypeLike

from jax_b12x import config
from jax_b12x.capability import DeviceCapability
from jax_b12x.moe import overlap_measured
from jax_b12x.moe.block_plan import BlockOrder, BlockPlan, DensePlan, OverlapChoice, plan_block
from jax_b12x.moe.overlap_measured import OverlapCase, OverlapTimes
from jax_b12x.moe.plan import Implementation, MoePlan
from jax_b12x.moe.plan import plan as make_plan
from jax_b12x.moe.recipe import Activation, RecipeName, WeightFormat

SharedFormat = Literal["dense", "nvfp4"]

# Recipes whose decode may be split so that the shared expert runs beside it, and up to how many
# tokens that is looked into: above, routed experts fill the device for so long that the shared one
# no longer shows.
SPLIT_RECIPES = ("nvfp4", "w4a8_nvfp4")
MAX_SPLIT_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class LocalShapes:
    """One device's part of an MoE layer.

    Attributes:
      recipe: of the routed experts.
      weight_format: of the routed experts.
      hidden: columns of ``x``.
      intermediate: of a routed expert, on this device.
      num_experts: routed experts on this device.
      top_k: routes of a token that this device can have.
      activation: between the two products.
      shared_format: of the shared expert; ``None`` where there is none.
      shared_intermediate: of the shared expert, on this device.
    """

    recipe: RecipeName
    weight_format: WeightFormat
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: Activation
    shared_format: SharedFormat | None
    shared_intermediate: int

    @property
    def overlap_case(self) -> OverlapCase | None:
        """What the measured table calls this; ``None`` without a shared expert."""
        if self.shared_format is None:
            return None
        return OverlapCase(
            recipe=self.recipe,
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            shared_format=self.shared_format,
            shared_intermediate=self.shared_intermediate,
        )


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """How one device runs its part of an MoE layer.

    Attributes:
      routed: the plan of the routed experts.
      block: the plan of the one call that does everything, and the order in it; ``None`` for many
        tokens, where router and dense shared expert are matrix products of XLA.
      reasons: why, a sentence each.
    """

    routed: MoePlan
    block: BlockPlan | None
    reasons: tuple[str, ...]

    @property
    def order(self) -> BlockOrder:
        """How router, routed and shared experts are submitted."""
        return "serial" if self.block is None else self.block.order


def decide(
    shapes: LocalShapes,
    *,
    num_tokens: int,
    dtype: DTypeLike,
    device: DeviceCapability,
    overlap: OverlapChoice = "auto",
    implementation: Implementation | None = None,
    router_in_block: bool = True,
    split_decode: bool | None = None,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = overlap_measured.MEASURED,
) -> LayerPlan:
    """Decides how a layer runs.

    Args:
      shapes: one device's part of the layer.
      num_tokens: rows of ``x``.
      dtype: of ``x``.
      device: what it runs on.
      overlap: ``"off"`` runs the shared expert in a row with the routed ones.
      implementation: forces how routed experts are launched.
      router_in_block: whether the block may route; otherwise it is given routes.
      split_decode: forces split (true) or fused (false) decode of the recipes that
        ``B12X_NVFP4_SPLIT_DECODE`` forces; that is read where this is not given.
      measured: where overlap was measured to win.

    Raises:
      ValueError: as for :func:`jax_b12x.moe.plan`.
      ConfigError: an environment variable holds a bad value.
    """
    if split_decode is None:
        split_decode = config.NVFP4_SPLIT_DECODE.get()
    reasons: list[str] = []
    prefers_split = False
    case = shapes.overlap_case
    may_split = shapes.recipe in SPLIT_RECIPES and num_tokens <= MAX_SPLIT_TOKENS
    forced = split_decode is not None and shapes.recipe in SPLIT_RECIPES
    if forced or implementation is not None:
        pass  # the plan says so, where it matters
    elif case is None:
        reasons.append("no shared expert: nothing to run beside the routed ones")
    elif overlap == "off":
        reasons.append("overlap is off: nothing runs beside the routed experts")
    elif may_split:
        row = overlap_measured.lookup(case, num_tokens, device, measured)
        if row is None:
            reasons.append(
                "split decode beside the shared expert was not measured for this: not preferred"
            )
        else:
            tokens, times = row
            prefers_split = times.split < times.fused
            reasons.append(
                f"{'split' if prefers_split else 'fused'} decode is the faster with the shared "
                f"expert: fused {times.fused:.1f} µs, split {times.split:.1f} (measured with "
                f"{tokens} token{'' if tokens == 1 else 's'}, {times.date})"
            )
    routed = make_plan(
        shapes.recipe,
        num_tokens=num_tokens,
        hidden=shapes.hidden,
        intermediate=shapes.intermediate,
        num_experts=shapes.num_experts,
        top_k=shapes.top_k,
        dtype=dtype,
        activation=shapes.activation,
        weight_format=shapes.weight_format,
        implementation="split" if prefers_split else implementation,
        device=device,
        split_decode=split_decode,
    )
    if prefers_split:
        why = "split, so that the layer's shared expert may run beside it"
        routed = dataclasses.replace(routed, reasons=(why, *routed.reasons[1:]))
    if routed.implementation in ("dynamic", "reference"):
        reasons.append("many tokens: router and dense expert are XLA's matrix products, in a row")
        return LayerPlan(routed, None, tuple(reasons))
    block = plan_block(
        routed, router=router_in_block, shared=shared_plan(shapes, routed), overlap=overlap
    )
    return LayerPlan(routed, block, tuple(reasons))


def shared_plan(shapes: LocalShapes, routed: MoePlan) -> MoePlan | DensePlan | None:
    """Returns the plan of the shared expert, one expert that every token goes to.

    Args:
      shapes: one device's part of the layer.
      routed: the plan of its routed experts, for the same tokens.
    """
    if shapes.shared_format is None:
        return None
    if shapes.shared_format == "dense":
        return DensePlan(shapes.shared_intermediate, shapes.activation)
    return make_plan(
        shapes.recipe,
        num_tokens=routed.num_tokens,
        hidden=shapes.hidden,
        intermediate=shapes.shared_intermediate,
        num_experts=1,
        top_k=1,
        dtype=routed.dtype,
        activation=shapes.activation,
        weight_format="nvfp4",
        device=routed.device,
    )
