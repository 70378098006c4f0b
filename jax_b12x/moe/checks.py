"""The argument checks of the MoE op: all at trace time, each naming the argument."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_b12x.arguments import check_array, check_integer, what
from jax_b12x.moe.geometry import BLOCK
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.planner import DTYPES
from jax_b12x.moe.recipe import Activation
from jax_b12x.moe.weights import ExpertWeights

_SCALE_DTYPE = {"nvfp4": "float8_e4m3fn", "mxfp4": "float8_e8m0fnu"}


def check_token_mask(token_mask: jax.Array, num_tokens: int) -> None:
    """Checks a mask of tokens.

    Raises:
      TypeError: it is no array.
      ValueError: it is of another dtype or shape.
    """
    check_array("token_mask", token_mask)
    if token_mask.shape != (num_tokens,) or token_mask.dtype != jnp.bool_:
        raise ValueError(
            f"token_mask is {token_mask.dtype.name}{list(token_mask.shape)}; it must be "
            f"bool[{num_tokens}]"
        )


def check_arrays(
    x: jax.Array,
    weights: ExpertWeights,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    *,
    weights_name: str = "weights",
) -> None:
    """Checks dtypes and shapes of the op's arrays, each alone and against the others.

    ``weights_name`` is what the caller's argument is called.

    Raises:
      TypeError: an argument is of another type or dtype.
      ValueError: a shape is wrong.
    """
    for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        check_array(name, array)
    if not isinstance(weights, ExpertWeights):
        raise TypeError(f"{weights_name} is {what(weights)}; it must be an ExpertWeights")
    _check_dtype("x", x, *DTYPES)
    _check_rank("x", x, "[num_tokens, hidden]")
    _check_dtype("topk_ids", topk_ids, "int32")
    _check_rank("topk_ids", topk_ids, "[num_tokens, top_k]")
    _check_dtype("topk_weights", topk_weights, "float32")
    _check_rank("topk_weights", topk_weights, "[num_tokens, top_k]")
    if topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids has {topk_ids.shape[0]} rows; it must have one for each of the "
            f"{x.shape[0]} rows of x"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights has shape {topk_weights.shape}; it must have the shape of topk_ids, "
            f"{topk_ids.shape}"
        )
    if x.shape[1] != weights.hidden:
        raise ValueError(
            f"x has shape {x.shape}; its rows must have weights.hidden = {weights.hidden} columns"
        )
    if weights.layout == "checkpoint":
        _check_checkpoint_layout(weights)


def check_choices(plan: MoePlan | None, activation: Activation | None) -> None:
    """Checks the types of the arguments that say how to run the op.

    Raises:
      TypeError: one is of another type; names it and what it must be.
    """
    if plan is not None and not isinstance(plan, MoePlan):
        raise TypeError(f"plan is {plan!r}; it must be a MoePlan, from jax_b12x.moe.plan, or None")
    if activation is not None and not isinstance(activation, Activation):
        raise TypeError(
            f"activation is {activation!r}; it must be an Activation, such as moe.SILU or "
            "moe.SWIGLU_OAI, or None"
        )


def check_not_contradicted(
    plan: MoePlan, recipe: str | None, activation: Activation | None
) -> None:
    """Checks that arguments given beside a plan say what it says.

    Raises:
      ValueError: one does not.
    """
    for name, given, planned in (
        ("recipe", recipe, plan.recipe),
        ("activation", activation, plan.activation),
    ):
        if given is not None and given != planned:
            raise ValueError(f"{name} is {given!r}, but the plan was made for {planned!r}")


def check_plan(plan: MoePlan, x: jax.Array, weights: ExpertWeights, topk_ids: jax.Array) -> None:
    """Checks that ``plan`` was made for these arguments.

    Raises:
      ValueError: it was not, or the weights are in another layout than it reads.
    """
    for name, actual, planned in (
        ("num_tokens", x.shape[0], plan.num_tokens),
        ("hidden", x.shape[1], plan.hidden),
        ("intermediate", weights.intermediate, plan.intermediate),
        ("num_experts", weights.num_experts, plan.num_experts),
        ("top_k", topk_ids.shape[1], plan.top_k),
        ("dtype of x", x.dtype.name, plan.dtype),
        ("weights.format", weights.format, plan.weight_format),
    ):
        if actual != planned:
            raise ValueError(f"{name} is {actual!r}, but the plan was made for {planned!r}")
    if weights.layout != plan.weight_layout:
        if weights.layout == "checkpoint":
            remedy = "prepare them with weights.prepare(plan)"
        else:
            remedy = (
                "pass the weights as they were loaded (ExpertWeights.unprepare() gives them back)"
            )
        raise ValueError(
            f"weights.layout is {weights.layout!r}, but {plan.implementation!r} on "
            f"{plan.platform} reads {plan.weight_layout!r}; {remedy}"
        )


def _check_checkpoint_layout(weights: ExpertWeights) -> None:
    experts, hidden, intermediate = weights.num_experts, weights.hidden, weights.intermediate
    block = BLOCK[weights.format]
    scale = _SCALE_DTYPE[weights.format]
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "w13": ("uint8", (experts, 2 * intermediate, hidden // 2)),
        "w13_scale": (scale, (experts, 2 * intermediate, hidden // block)),
        "w13_global_scale": ("float32", (experts, 2)),
        "w2": ("uint8", (experts, hidden, intermediate // 2)),
        "w2_scale": (scale, (experts, hidden, intermediate // block)),
        "w2_global_scale": ("float32", (experts,)),
        "w13_input_scale": ("float32", ()),
        "w2_input_scale": ("float32", (experts,)),
        "w13_bias": ("float32", (experts, 2 * intermediate)),
        "w2_bias": ("float32", (experts, hidden)),
    }
    for name, (dtype, shape) in expected.items():
        array = getattr(weights, name)
        check_array(f"weights.{name}", array)
        _check_dtype(f"weights.{name}", array, dtype)
        absent_bias = name.endswith("_bias") and array.shape == (experts, 0)
        if array.shape != shape and not absent_bias:
            raise ValueError(f"weights.{name} has shape {array.shape}; it must be {shape}")


def _check_dtype(name: str, array: jax.Array, *allowed: str) -> None:
    if array.dtype.name not in allowed:
        raise TypeError(f"{name} has dtype {array.dtype.name}; it must be {' or '.join(allowed)}")


def _check_rank(name: str, array: jax.Array, shape: str) -> None:
    if array.ndim != 2:
        hint = "; under vmap, map over an axis in front of these" if array.ndim == 1 else ""
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}{hint}")


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    """Checks groups of experts; raises ``ValueError`` where they do not fit."""
    check_integer("num_groups", num_groups)
    check_integer("topk_groups", topk_groups)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups is {num_groups}; it must divide the {num_experts} experts")
    group_size = num_experts // num_groups
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups is {topk_groups}; it must be within [1, {num_groups}]")
    if top_k > topk_groups * group_size:
        raise ValueError(
            f"top_k is {top_k}; {topk_groups} groups of {group_size} experts offer no more than "
            f"{topk_groups * group_size}"
        )
