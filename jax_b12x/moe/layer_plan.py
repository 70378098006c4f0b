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
from jax_b12x.moe import overlap_measured, routing
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
    def joined(self) -> int:
        """As how many routed experts the shared one could stand among them; 0: it could not."""
        fits = self.shared_format == "nvfp4" and not self.shared_intermediate % self.intermediate
        return self.shared_intermediate // self.intermediate if fits else 0

    @property
    def join_obstacle(self) -> str | None:
        """Why the shared expert cannot be joined to the routed ones, or ``None`` if it can."""
        if self.shared_format == "dense":
            return "it is dense, and the routed experts' launch reads packed ones"
        if self.weight_format != self.shared_format:
            return (
                f"it is packed as {self.shared_format}, the routed experts as {self.weight_format}"
            )
        if not self.joined:
            return (
                f"a device's {self.shared_intermediate} columns of it are no multiple of the "
                f"{self.intermediate} of a routed expert"
            )
        for name, value, limit in (
            ("top_k", self.top_k, routing.MAX_TOP_K),
            ("num_experts", self.num_experts, routing.MAX_EXPERTS),
        ):
            if value + self.joined > limit:
                return f"{name} is {value}, with {self.joined} more than the {limit} of a launch"
        return None

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
      joined: as how many experts the shared one is among the routed ones, whose plan counts them.
    """

    routed: MoePlan
    block: BlockPlan | None
    reasons: tuple[str, ...]
    joined: int = 0

    @property
    def order(self) -> BlockOrder:
        """How router, routed and shared experts are submitted."""
        if self.block is None:
            return "joined" if self.joined else "serial"
        return self.block.order


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
    joined: bool | None = None,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = overlap_measured.MEASURED,
) -> LayerPlan:
    """Decides how a layer runs.

    Whether the shared expert is joined to the routed ones is decided when parameters are prepared,
    for all numbers of tokens: there it would be held twice otherwise.

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
      joined: whether the parameters hold the shared expert among the routed ones; what
        ``MoELayer.prepare`` does with parameters that allow it, if not given.
      measured: where overlap was measured to win.

    Raises:
      ValueError: as for :func:`jax_b12x.moe.plan`; or the shared expert cannot be joined.
      ConfigError: an environment variable holds a bad value.
    """
    if split_decode is None:
        split_decode = config.NVFP4_SPLIT_DECODE.get()
    reasons: list[str] = []
    joins, join_reason = prefers_joined(shapes, device, overlap, measured)
    if joined is None:
        joined = joins
    elif joined and shapes.join_obstacle is not None:
        raise ValueError(f"joined is True, but the shared expert cannot be: {shapes.join_obstacle}")
    elif joined and overlap == "off":
        raise ValueError(
            "joined is True, but overlap is 'off', which runs the shared expert after the routed "
            "ones: prepare the parameters with this layer"
        )
    elif joins and not joined:
        join_reason = "not joined: the parameters hold the shared expert by itself"
    if joined:
        return _joined(
            shapes,
            num_tokens=num_tokens,
            dtype=dtype,
            device=device,
            implementation=implementation,
            router_in_block=router_in_block,
            split_decode=split_decode,
            reason=join_reason,
        )
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
    if join_reason is not None:
        reasons.append(join_reason)
    if routed.implementation in ("dynamic", "reference"):
        reasons.append("many tokens: router and dense expert are XLA's matrix products, in a row")
        return LayerPlan(routed, None, tuple(reasons))
    block = plan_block(
        routed, router=router_in_block, shared=shared_plan(shapes, routed), overlap=overlap
    )
    return LayerPlan(routed, block, tuple(reasons))


def prefers_joined(
    shapes: LocalShapes,
    device: DeviceCapability,
    overlap: OverlapChoice,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = overlap_measured.MEASURED,
) -> tuple[bool, str | None]:
    """Returns whether parameters are prepared with the shared expert among the routed ones.

    Args: those of :func:`decide`.

    Returns:
      Whether, and why; ``None`` where there is no shared expert or ``overlap`` is off.
    """
    case = shapes.overlap_case
    if case is None or overlap == "off":
        return False, None
    if shapes.join_obstacle is not None:
        return False, f"the shared expert is not joined to the routed ones: {shapes.join_obstacle}"
    experts = f"{shapes.joined} expert{'' if shapes.joined == 1 else 's'}"
    why = f"the shared expert is joined to the routed ones, as {experts} that every token goes to"
    rows = overlap_measured.joined_rows(case, device, measured)
    if not rows:
        return True, f"{why}: one launch reads all (not measured for this)"
    together = sum(times.joined or 0 for times in rows.values())
    apart = sum(min(times.fused, times.split) for times in rows.values())
    tokens = ", ".join(map(str, sorted(rows)))
    compared = (
        f"{together:.1f} µs over {tokens} tokens, {apart:.1f} apart (measured "
        f"{max(times.date for times in rows.values())})"
    )
    if together <= apart:
        return True, f"{why}: {compared}"
    return False, f"the shared expert is not joined to the routed ones, which is slower: {compared}"


def _joined(
    shapes: LocalShapes,
    *,
    num_tokens: int,
    dtype: DTypeLike,
    device: DeviceCapability,
    implementation: Implementation | None,
    router_in_block: bool,
    split_decode: bool | None,
    reason: str | None,
) -> LayerPlan:
    """Returns the plan of a layer whose shared expert is among the routed ones."""
    routed = make_plan(
        shapes.recipe,
        num_tokens=num_tokens,
        hidden=shapes.hidden,
        intermediate=shapes.intermediate,
        num_experts=shapes.num_experts + shapes.joined,
        top_k=shapes.top_k + shapes.joined,
        dtype=dtype,
        activation=shapes.activation,
        weight_format=shapes.weight_format,
        implementation=implementation,
        device=device,
        split_decode=split_decode,
    )
    reasons = () if reason is None else (reason,)
    if routed.implementation in ("dynamic", "reference"):
        many = "many tokens: the router is a matrix product of XLA"
        return LayerPlan(routed, None, (*reasons, many), shapes.joined)
    block = plan_block(routed, router=router_in_block, joined=shapes.joined)
    return LayerPlan(routed, block, reasons, shapes.joined)


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
