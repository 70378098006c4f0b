"""The joined shared expert: a packed shared expert that stands among the routed experts.

Every token goes to it with weight 1, so that the routed experts' launch reads and computes it with
the others. Where it is a multiple as wide as a routed expert, it is cut along its intermediate into
as many experts, whose outputs add up to its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x.moe import layout_sm90
from jax_b12x.moe.recipe import get_recipe
from jax_b12x.moe.weights import ExpertWeights, check_block_scales

if TYPE_CHECKING:
    from jax_b12x.moe.plan import MoePlan

_MATRICES = ("w13", "w2")
# Arrays with an entry an expert, whatever the layout is.
_SMALL = ("w13_global_scale", "w2_global_scale", "w2_input_scale", "w13_bias", "w2_bias")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedExpert:
    """A shared expert that is the last experts of the routed ones; ``MoELayer.prepare`` makes it.

    Attributes:
      w13_input_scale: ``float32[]``: what the shared expert had; everything else of it is among the
        routed experts' arrays.
      num_experts: how many experts it is there.
    """

    w13_input_scale: jax.Array
    num_experts: int = dataclasses.field(metadata={"static": True})


def obstacle(experts: ExpertWeights, shared: ExpertWeights, recipe: str) -> str | None:
    """Returns why weights cannot be joined whose sizes and formats could, or ``None``.

    Args:
      experts: the routed experts.
      shared: the shared expert.
      recipe: what they are computed in.
    """
    for name in ("w13_bias", "w2_bias"):
        own, others = bool(getattr(shared, name).size), bool(getattr(experts, name).size)
        if own != others:
            has, has_not = ("shared", "routed") if own else ("routed", "shared")
            return f"of shared and routed experts only the {has} have a {name}, the {has_not} none"
    return scale_obstacle(experts, shared, recipe)


def scale_obstacle(
    experts: ExpertWeights, shared: ExpertWeights | JoinedExpert, recipe: str
) -> str | None:
    """Returns why one launch cannot quantize ``x`` for routed and shared experts, or ``None``.

    Args: those of :func:`obstacle`.
    """
    if not get_recipe(recipe).quantized_activations:
        return None
    scales = (shared.w13_input_scale, experts.w13_input_scale)
    if any(isinstance(scale, jax.core.Tracer) for scale in scales):
        return "input scales are traced, and must be known to be compared"
    own_scale, scale = (np.asarray(scale) for scale in scales)
    if own_scale != scale:
        return (
            f"the shared expert's w13_input_scale is {own_scale:.6g} and the routed experts' "
            f"{scale:.6g}: one launch quantizes x once"
        )
    return None


def join(
    experts: ExpertWeights,
    shared: ExpertWeights,
    count: int,
    plan: MoePlan,
    *,
    donate: bool = False,
) -> tuple[ExpertWeights, JoinedExpert]:
    """Returns the routed experts with the shared one behind them, in the layout that a plan reads.

    Matrices are made one after the other, so that one of the two is all the memory that it needs
    beside both sets of weights.

    Args:
      experts: the routed experts, in any layout.
      shared: the shared expert, ``count`` times as wide as one of them.
      count: how many experts it becomes.
      plan: a plan for all of them together.
      donate: free the routed experts' packed arrays as soon as they are copied.

    Raises:
      ValueError: a block scale is negative or NaN, which the layout has no room for.
    """
    scale = shared.w13_input_scale
    if not isinstance(experts.w13, jax.core.Tracer) and len(experts.w13.devices()) == 1:
        shared = jax.device_put(shared, experts.w13.sharding)
    if count > 1:
        shared = _cut(shared.unprepare(), count)
    packs = experts.layout == "checkpoint" and plan.weight_layout != "checkpoint"
    if packs:
        shared = shared.unprepare()
    else:
        experts = experts.prepare(dataclasses.replace(plan, num_experts=experts.num_experts))
        shared = shared.prepare(dataclasses.replace(plan, num_experts=count))
    arrays: dict[str, jax.Array] = {}
    for name in _MATRICES:
        scale_name = f"{name}_scale"
        both = [(getattr(w, name), getattr(w, scale_name)) for w in (experts, shared)]
        if packs:
            for _, block_scale in both:
                check_block_scales(scale_name, block_scale)
            arrays[name] = layout_sm90.pack(*both[0], gated=name == "w13", behind=both[1])
            no_scales = jnp.zeros((plan.num_experts, 0), both[0][1].dtype)
            arrays[scale_name] = no_scales
        else:
            for array_name, parts in zip((name, scale_name), zip(*both, strict=True), strict=True):
                arrays[array_name] = jnp.concatenate(parts)
        if donate:
            jax.block_until_ready(arrays[name])
            for array in both[0]:
                array.delete()
    for name in _SMALL:
        arrays[name] = jnp.concatenate([getattr(experts, name), getattr(shared, name)])
    replaced: dict[str, Any] = {**arrays, "layout": plan.weight_layout}
    return dataclasses.replace(experts, **replaced), JoinedExpert(scale, count)


def separate(experts: ExpertWeights, joined: JoinedExpert) -> tuple[ExpertWeights, ExpertWeights]:
    """Returns routed experts and shared expert in the ``checkpoint`` layout, as they were loaded.

    Args:
      experts: all of them, from :func:`join`.
      joined: likewise.
    """
    experts = experts.unprepare()
    count = experts.num_experts - joined.num_experts

    def part(which: slice) -> ExpertWeights:
        part: ExpertWeights = jax.tree.map(lambda a: a[which] if a.ndim else a, experts)
        return part

    shared = _uncut(part(slice(count, None)))
    return part(slice(count)), dataclasses.replace(shared, w13_input_scale=joined.w13_input_scale)


def _cut(shared: ExpertWeights, count: int) -> ExpertWeights:
    """Returns one expert, in the ``checkpoint`` layout, as several that add up to it."""
    intermediate = shared.intermediate // count

    def rows(array: jax.Array) -> jax.Array:
        if array.shape[1] == 0:
            return jnp.zeros((count, 0), array.dtype)
        split = array.reshape(2, count, intermediate, *array.shape[2:])  # gate and up
        return jnp.swapaxes(split, 0, 1).reshape(count, 2 * intermediate, *array.shape[2:])

    def columns(array: jax.Array) -> jax.Array:
        return jnp.swapaxes(array.reshape(array.shape[1], count, -1), 0, 1)

    def repeated(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, count, axis=0)

    bias = jnp.zeros((count - 1, *shared.w2_bias.shape[1:]), shared.w2_bias.dtype)
    return dataclasses.replace(
        shared,
        w13=rows(shared.w13),
        w13_scale=rows(shared.w13_scale),
        w13_global_scale=repeated(shared.w13_global_scale),
        w2=columns(shared.w2),
        w2_scale=columns(shared.w2_scale),
        w2_global_scale=repeated(shared.w2_global_scale),
        w2_input_scale=repeated(shared.w2_input_scale),
        w13_bias=rows(shared.w13_bias),
        w2_bias=jnp.concatenate([shared.w2_bias, bias]),
        intermediate=intermediate,
    )


def _uncut(parts: ExpertWeights) -> ExpertWeights:
    """Undoes :func:`_cut`."""
    count, hidden = parts.num_experts, parts.hidden
    intermediate = count * parts.intermediate

    def rows(array: jax.Array) -> jax.Array:
        if array.shape[1] == 0:
            return array[:1]
        split = array.reshape(count, 2, parts.intermediate, *array.shape[2:])
        return jnp.swapaxes(split, 0, 1).reshape(1, 2 * intermediate, *array.shape[2:])

    def columns(array: jax.Array) -> jax.Array:
        return jnp.swapaxes(array, 0, 1).reshape(1, hidden, -1)

    return dataclasses.replace(
        parts,
        w13=rows(parts.w13),
        w13_scale=rows(parts.w13_scale),
        w13_global_scale=parts.w13_global_scale[:1],
        w2=columns(parts.w2),
        w2_scale=columns(parts.w2_scale),
        w2_global_scale=parts.w2_global_scale[:1],
        w2_input_scale=parts.w2_input_scale[:1],
        w13_bias=rows(parts.w13_bias),
        w2_bias=parts.w2_bias[:1],
        intermediate=intermediate,
    )
