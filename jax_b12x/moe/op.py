"""``fused_moe``: the MoE layer as one FFI call, under one name on every platform."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x import _native, config, workspace
from jax_b12x.moe import checks, reference
from jax_b12x.moe.inference_only import without_derivative
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.plan import plan as make_plan
from jax_b12x.moe.recipe import SILU, Activation
from jax_b12x.moe.weights import ExpertWeights
from jax_b12x.workspace_call import Need, call

TARGET = "b12x_moe"


def fused_moe(
    x: jax.Array,
    weights: ExpertWeights,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    *,
    plan: MoePlan | None = None,
    recipe: str | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Routes each token through its experts and returns the weighted sum of what they give.

    It works under ``jit``, inside ``shard_map``, under ``vmap`` over tokens (which becomes one call
    with more tokens), with the persistent compilation cache, and under ``jax.export``, which has to
    be told that the custom call is stable::

        stable = jax.export.DisabledSafetyCheck.custom_call(jax_b12x.moe.TARGET)
        exported = jax.export.export(jax.jit(f), disabled_checks=[stable])(x)

    Weights that are an argument of an exported function are a pytree, which has to be registered
    before the program can be serialized. A function of ``jax.tree.leaves(weights)`` needs nothing
    of the kind: see "Exporting" on the documentation's page about the layer. The process that runs
    an exported program imports jax_b12x and calls ``jax_b12x.register()``.

    The op is inference-only: differentiating it is an error. Where it stands in a function that is
    differentiated for other reasons, put ``jax.lax.stop_gradient`` around its arguments. Shapes are
    static: ``jax.export`` with symbolic dimensions is refused.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``. A token with a NaN gives NaN in its own row only.
      weights: the experts, in the layout that the plan names.
      topk_ids: ``int32[num_tokens, top_k]``. An id of -1, or any outside ``[0, num_experts)``,
        contributes nothing and reads nothing, whatever its weight is.
      topk_weights: ``float32[num_tokens, top_k]``.
      plan: how to run it, from :func:`jax_b12x.moe.plan`; made from the arguments if not given.
      recipe: ``"w4a16"`` (the default) or ``"nvfp4"``; a plan brings its own.
      activation: between the two products, SiLU by default; a plan brings its own.

    Returns:
      ``x.dtype[num_tokens, hidden]``; empty for zero tokens.

    Raises:
      TypeError: an argument has the wrong dtype; names it, what it was and what it must be.
      ValueError: an argument has the wrong shape or layout, or contradicts the plan.
      NativeError: the extension is not built.
    """
    checks.check_choices(plan, activation)
    checks.check_arrays(x, weights, topk_ids, topk_weights)
    if plan is None:
        plan = make_plan(
            recipe or "w4a16",
            num_tokens=x.shape[0],
            hidden=x.shape[1],
            intermediate=weights.intermediate,
            num_experts=weights.num_experts,
            top_k=topk_ids.shape[1],
            dtype=x.dtype,
            activation=activation or SILU,
            weight_format=weights.format,
        )
    else:
        checks.check_not_contradicted(plan, recipe, activation)
    checks.check_plan(plan, x, weights, topk_ids)
    if plan.num_tokens == 0:
        return jnp.zeros_like(x)
    out: jax.Array = _inference_only(plan, workspace.current())(x, topk_ids, topk_weights, weights)
    return out


@functools.lru_cache(maxsize=1024)
def _inference_only(plan: MoePlan, place: workspace.Place) -> Any:
    """Returns the op of one plan, with its rules for ``vmap`` and for differentiation."""

    @jax.custom_batching.custom_vmap
    def batchable(
        x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, weights: ExpertWeights
    ) -> jax.Array:
        return _run(plan, place, x, topk_ids, topk_weights, weights)

    @batchable.def_vmap  # type: ignore[untyped-decorator, unused-ignore]
    def over_tokens(
        axis_size: int,
        in_batched: Any,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        weights: ExpertWeights,
    ) -> tuple[jax.Array, bool]:
        *tokens_batched, weights_batched = in_batched
        if any(jax.tree.leaves(weights_batched)):
            raise ValueError(
                "weights are mapped by vmap; fused_moe works under vmap over tokens (x, topk_ids, "
                "topk_weights), with weights that are the same for all (in_axes None). "
                "jax.lax.cond with a mapped predicate maps what its branches use: take jnp.where"
            )
        rows = axis_size * plan.num_tokens
        flat = [
            (array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))).reshape(
                rows, array.shape[-1]
            )
            for array, batched in zip((x, topk_ids, topk_weights), tokens_batched, strict=True)
        ]
        out = _inference_only(_replan(plan, rows), place)(*flat, weights)
        return out.reshape(axis_size, plan.num_tokens, plan.hidden), True

    return without_derivative("fused_moe", "differentiate jax_b12x.moe.reference.moe", batchable)


def _replan(plan: MoePlan, num_tokens: int) -> MoePlan:
    """Returns the plan of the same call with another number of tokens."""
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
        implementation="reference" if plan.implementation == "reference" else None,
        device=plan.device,
    )


def _run(
    plan: MoePlan,
    place: workspace.Place,
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    weights: ExpertWeights,
) -> jax.Array:
    if plan.implementation == "reference":
        return reference.moe(
            x,
            weights,
            topk_ids,
            topk_weights,
            recipe=plan.recipe,
            activation=plan.activation,
        )
    ensure_runnable(plan)
    out, _ = call(
        TARGET,
        [(x.shape, x.dtype), ((plan.scratch_bytes,), jnp.uint8)],
        (x, topk_ids, topk_weights, *arrays(weights)),
        attributes(plan),
        need=Need(bytes=plan.workspace_bytes),
        place=place,
    )
    return out


def ensure_runnable(plan: MoePlan) -> None:
    """Registers the custom calls.

    Raises:
      NativeError: the extension that the plan needs is not built.
    """
    _native.ensure_registered()
    if plan.platform == "cuda" and jax.default_backend() != "cpu" and _native.cuda() is None:
        raise _native.NativeError(
            f"{plan.implementation!r} on {plan.device} needs the CUDA half of jax_b12x, which is "
            "not built: put nvcc on PATH and install again, or plan with implementation='reference'"
        )


def arrays(weights: ExpertWeights) -> tuple[jax.Array, ...]:
    """Returns the ten arrays of ``weights`` in the order of its fields.

    A bias that is absent is passed as one zero of rank 1: XLA's CPU compiler (jax 0.11.2) crashes
    on a custom call with an operand of size 0 inside ``shard_map``.
    """
    fields = (
        getattr(weights, field.name)
        for field in dataclasses.fields(weights)
        if not field.metadata.get("static")
    )
    return tuple(array if array.size else jnp.zeros((1,), jnp.float32) for array in fields)


def attributes(plan: MoePlan) -> dict[str, Any]:
    """Returns the call's attributes; ``ffi/handlers/moe_attributes.h`` reads them.

    Values only, never pointers, so that a compiled program can be stored and run elsewhere.
    """
    return {
        "recipe": plan.recipe,
        "weight_format": plan.weight_format,
        "implementation": plan.implementation,
        "layout": plan.weight_layout,
        "hidden": np.int64(plan.hidden),
        "intermediate": np.int64(plan.intermediate),
        "activation": plan.activation.kind,
        "alpha": np.float32(plan.activation.alpha),
        "limit": np.float32(plan.activation.limit),
        "host_isa": _usable_isa(plan),
        "geometry": {name: np.int64(value) for name, value in plan.geometry},
    }


def _usable_isa(plan: MoePlan) -> str:
    """Returns the instruction set that the plan asks for.

    Raises:
      ConfigError: this processor lacks the one that the environment forced.
    """
    if plan.platform == "cpu" and plan.host_isa != "auto":
        usable = _native.host().host_isas()
        if plan.host_isa not in usable:
            raise config.ConfigError(
                f"{config.HOST_ISA.name}={plan.host_isa!r} cannot run on this processor, which has "
                f"{', '.join(usable)}"
            )
    return plan.host_isa
