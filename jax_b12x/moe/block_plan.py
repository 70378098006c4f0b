"""Block plans: in which order a block submits its router, its routed experts and its shared one."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_b12x.arguments import check_integer, check_kind
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.plan import plan as make_plan
from jax_b12x.moe.recipe import SILU, Activation

BlockOrder = Literal["joined", "concurrent", "pre_resident", "serial"]
OverlapChoice = Literal["auto", "off"]

# The words of two grid barriers; `ffi/handlers/block_call.h` has their places.
_BARRIERS_BYTES = 512


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """How a dense shared expert runs: barrier-free launches of up to 64 tokens.

    Attributes:
      intermediate: columns between the two products.
      activation: between them.
    """

    intermediate: int
    activation: Activation = SILU

    def __post_init__(self) -> None:
        check_integer("intermediate", self.intermediate)
        check_kind("activation", self.activation, Activation, "an Activation, such as moe.SILU")
        if self.intermediate < 16 or self.intermediate % 16:
            raise ValueError(
                f"intermediate is {self.intermediate}; it must be a positive multiple of 16"
            )


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """How one block with static shapes is launched; made by :func:`plan_block`.

    Attributes:
      routed: the plan of the routed experts.
      router: whether the router is part of the block.
      shared: the plan of a shared expert of its own, or ``None`` where there is none.
      overlap: what the caller asked for.
      order: ``"joined"``: the shared expert is among the routed ones, so that their launch reads it
        as well. ``"concurrent"``: the shared expert is submitted to an auxiliary stream before the
        router and the routed launches, and joined after them. ``"pre_resident"``: it is submitted
        before the router and joined before the routed launch is submitted. ``"serial"``: it follows
        the routed experts on the same stream. The last three give the same bits; ``"joined"``
        rounds once less.
      reasons: why, a sentence each.
      joined: as how many experts the shared one stands behind the routed ones: their plan counts
        them, among its experts and a token's routes.
    """

    routed: MoePlan
    router: bool
    shared: MoePlan | DensePlan | None
    overlap: OverlapChoice
    order: BlockOrder
    reasons: tuple[str, ...]
    joined: int = 0

    @property
    def streams(self) -> int:
        """Auxiliary streams that it keeps on each device, 0 or 1."""
        return int(self.order in ("concurrent", "pre_resident"))

    @property
    def workspace_bytes(self) -> int:
        """What it keeps on each device from run to run, in bytes."""
        packed = self.shared if isinstance(self.shared, MoePlan) else None
        resident = self.routed.workspace_bytes or (packed and packed.workspace_bytes)
        return _BARRIERS_BYTES if resident else 0

    def explain(self) -> str:
        """Returns what was chosen and why, as text for people."""
        if self.joined:
            last = "last" if self.joined == 1 else f"last {self.joined}"
            shared = f"joined: the {last} of the routed experts"
        elif self.shared is None:
            shared = "none"
        elif isinstance(self.shared, DensePlan):
            shared = f"dense, intermediate {self.shared.intermediate}"
        else:
            shared = (
                f"{self.shared.recipe} {self.shared.implementation}, intermediate "
                f"{self.shared.intermediate}"
            )
        lines = [
            f"MoE block, {self.routed.num_tokens} "
            f"token{'' if self.routed.num_tokens == 1 else 's'}",
            f"  router          {'in the block' if self.router else 'outside: routes are given'}",
            f"  shared expert   {shared}",
            f"  order           {self.order}",
            f"  workspace       {self.workspace_bytes:,} bytes, {self.streams} stream"
            f"{'' if self.streams == 1 else 's'}",
            "  because",
            *(f"    - {reason}" for reason in self.reasons),
            "the routed experts:",
            *("  " + line for line in self.routed.explain().splitlines()),
        ]
        return "\n".join(lines)


def plan_block(
    routed: MoePlan,
    *,
    router: bool,
    shared: MoePlan | DensePlan | None = None,
    overlap: OverlapChoice = "auto",
    joined: int = 0,
) -> BlockPlan:
    """Decides in which order a block submits its work. Pure: same arguments, same plan.

    Args:
      routed: the plan of the routed experts.
      router: whether the router is part of the block; otherwise routes are given.
      shared: the plan of the shared expert: a :class:`DensePlan`, or a :class:`MoePlan` of one
        expert and ``top_k=1`` for as many tokens. Where it runs beside other work it is planned
        again as split, which gives the same bits: two grids that must be resident do not go
        together.
      overlap: ``"auto"`` overlaps what the routed plan tolerates; ``"off"`` overlaps nothing.
      joined: how many of the routed plan's experts, the last ones, are the shared expert; every
        token goes to each of them, in its last routes. A router in the block writes those.

    Returns:
      The plan; ``explain()`` prints it.

    Raises:
      TypeError: a plan is of another type, or router is not a bool.
      ValueError: the plans do not belong together, or there is no kernel.
    """
    if not isinstance(routed, MoePlan):
        raise TypeError(f"routed is {routed!r}; it must be a MoePlan, from jax_b12x.moe.plan")
    if shared is not None and not isinstance(shared, MoePlan | DensePlan):
        raise TypeError(f"shared is {shared!r}; it must be a MoePlan, a DensePlan or None")
    if not isinstance(router, bool):
        raise TypeError(
            f"router is {router!r}; it must be True (the router is part of the block) or False "
            "(routes are given)"
        )
    if overlap not in ("auto", "off"):
        raise ValueError(f"overlap is {overlap!r}; it must be 'auto' or 'off'")
    for name, part in (("routed", routed), ("shared", shared)):
        if isinstance(part, MoePlan) and part.implementation == "reference":
            raise ValueError(
                f"the {name} plan is 'reference', plain jnp without a kernel; compose "
                "moe.routing, moe.fused_moe and moe.dense_mlp in JAX instead of a block"
            )
    if isinstance(shared, MoePlan):
        _check_shared(routed, shared)
    if joined:
        _check_joined(routed, shared, overlap, joined)
        why = "the shared expert is one of the routed ones: their launch reads it with the others"
        return BlockPlan(routed, router, None, overlap, "joined", (why,), joined)
    order, reasons = _order(routed, router, shared, overlap)
    if isinstance(shared, MoePlan) and order != "serial" and shared.implementation == "fused":
        shared = _split(shared)
        reasons = (*reasons, "the shared expert runs split, so that it is no resident grid itself")
    return BlockPlan(routed, router, shared, overlap, order, reasons)


def with_num_tokens(plan: BlockPlan, num_tokens: int) -> BlockPlan:
    """Returns the plan of the same block for another number of tokens."""
    if num_tokens == plan.routed.num_tokens:
        return plan
    shared = plan.shared
    if isinstance(shared, MoePlan):
        shared = _with_num_tokens(shared, num_tokens)
    return plan_block(
        _with_num_tokens(plan.routed, num_tokens),
        router=plan.router,
        shared=shared,
        overlap=plan.overlap,
        joined=plan.joined,
    )


def _order(
    routed: MoePlan,
    router: bool,
    shared: MoePlan | DensePlan | None,
    overlap: OverlapChoice,
) -> tuple[BlockOrder, tuple[str, ...]]:
    if shared is None:
        return "serial", ("no shared expert: there is nothing to overlap",)
    if overlap == "off":
        return "serial", ("overlap is off: the caller wants one stream",)
    if routed.overlap == "concurrent":
        return "concurrent", (
            f"the routed experts are {routed.implementation}: no launch of theirs waits for a "
            "whole grid, so the shared expert runs beside them; it is submitted first",
        )
    if routed.overlap == "pre_resident":
        if router:
            return "pre_resident", (
                "the routed grid must be resident as a whole: the shared expert overlaps the "
                "router and is joined before the routed launch is submitted",
            )
        return "serial", (
            "the routed grid must be resident as a whole, and routes are given: there is no router "
            "in the block to overlap",
        )
    return "serial", (f"the routed plan ({routed.implementation}) tolerates nothing beside it",)


def _check_joined(
    routed: MoePlan, shared: MoePlan | DensePlan | None, overlap: OverlapChoice, joined: int
) -> None:
    if isinstance(joined, bool) or not isinstance(joined, int) or not 0 < joined < routed.top_k:
        raise ValueError(
            f"joined is {joined!r}; it must be an integer within [0, {routed.top_k - 1}]: less "
            f"than the plan's top_k ({routed.top_k}), which counts a route to each joined expert"
        )
    if shared is not None:
        raise ValueError(
            f"joined is {joined}, and shared is a {type(shared).__name__}; a shared expert is "
            "joined to the routed ones or one of its own: leave one of the two out"
        )
    if overlap == "off":
        raise ValueError(
            f"joined is {joined}, and overlap is 'off', which runs the shared expert after the "
            "routed ones; plan it as shared"
        )


def _check_shared(routed: MoePlan, shared: MoePlan) -> None:
    for name, actual, required in (
        ("num_experts", shared.num_experts, 1),
        ("top_k", shared.top_k, 1),
        ("num_tokens", shared.num_tokens, routed.num_tokens),
        ("hidden", shared.hidden, routed.hidden),
        ("dtype", shared.dtype, routed.dtype),
        ("device", shared.device, routed.device),
    ):
        if actual != required:
            raise ValueError(
                f"shared.{name} is {actual}; beside these routed experts it must be {required}"
            )


def _split(plan: MoePlan) -> MoePlan:
    return _replan(plan, plan.num_tokens, "split")


def _with_num_tokens(plan: MoePlan, num_tokens: int) -> MoePlan:
    return _replan(plan, num_tokens, None)


def _replan(plan: MoePlan, num_tokens: int, implementation: Literal["split"] | None) -> MoePlan:
    return make_plan(
        plan.recipe,
        num_tokens=num_tokens,
        hidden=plan.hidden,
        intermediate=plan.intermediate,
        num_experts=plan.num_experts,
        top_k=plan.top_k,
        dtype=plan.dtype,
        activation=plan.activation,
        weight_format=plan.weight_format,
        implementation=implementation,
        device=plan.device,
    )
