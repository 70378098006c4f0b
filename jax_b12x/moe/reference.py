"""The meaning of the MoE ops, in plain ``jnp`` and fp32: what every kernel is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_b12x.arguments import check_array, check_kind
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.recipe import SILU, Activation, Recipe, WeightFormat, get_recipe
from jax_b12x.moe.weights import ExpertWeights
from jax_b12x.quant import QuantizedTensor, mxfp4, nvfp4


def moe(
    x: jax.Array,
    weights: ExpertWeights,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    *,
    recipe: str = "w4a16",
    activation: Activation = SILU,
) -> jax.Array:
    """Returns the MoE layer's output, computed one expert after the other.

    Only one expert is dequantized at a time, so that a model that fits packed can be checked.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``.
      weights: the experts, in the ``checkpoint`` layout.
      topk_ids: ``int32[num_tokens, top_k]``; an id outside ``[0, num_experts)`` contributes
        nothing.
      topk_weights: ``float32[num_tokens, top_k]``.
      recipe: the numeric contract, see :class:`~jax_b12x.moe.recipe.Recipe`.
      activation: the activation between the two products.

    Returns:
      ``x.dtype[num_tokens, hidden]``.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such recipe.
    """
    for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        check_array(name, array)
    check_kind("weights", weights, ExpertWeights, "an ExpertWeights")
    check_kind("activation", activation, Activation, "an Activation, such as moe.SILU")
    contract = get_recipe(recipe)
    a, a_scale = _input(x, weights.w13_input_scale, contract)

    def add_expert(total: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        def add(total: jax.Array) -> jax.Array:
            # Left alone: a scale of the layer, and a bias that is not there.
            one = jax.tree.map(
                lambda leaf: leaf[expert] if leaf.ndim and leaf.size else leaf, weights
            )
            y = _expert(a, a_scale, one, contract, activation, x.dtype)
            # A route that is not taken may have any weight, NaN too, and its y may be NaN.
            for k in range(topk_ids.shape[1]):
                taken = topk_ids[:, k] == expert
                product = topk_weights[:, k, None] * y
                total = total.at[k].set(jnp.where(taken[:, None], product, total[k]))
            return total

        # An expert without routes adds nothing, and few tokens leave most of them without.
        return jax.lax.cond(jnp.any(topk_ids == expert), add, lambda total: total, total), None

    # One slice a route, so that they are added in order.
    nothing = jnp.zeros((topk_ids.shape[1], *x.shape), jnp.float32)
    # Inside shard_map the sum varies over the mesh axes that any of these varies over.
    for array in (x, topk_ids, topk_weights, weights.w2_global_scale):
        nothing = nothing + jnp.zeros_like(array, jnp.float32).sum()
    routes, _ = jax.lax.scan(add_expert, nothing, jnp.arange(weights.num_experts))
    out = jnp.zeros(x.shape, jnp.float32)
    for k in range(topk_ids.shape[1]):
        out = out + routes[k]
    return out.astype(x.dtype)


def _expert(
    a: jax.Array,
    a_scale: jax.Array,
    one: ExpertWeights,
    recipe: Recipe,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Returns one expert's ``f32[num_tokens, hidden]`` for every token; ``one`` has no E axis."""
    product = _dot(a, _unscaled(one.w13, one.w13_scale, one.format))
    gate, up = jnp.split(product, 2, axis=1)
    gate = gate * (a_scale * one.w13_global_scale[0])
    up = up * (a_scale * one.w13_global_scale[1])
    if one.w13_bias.size:
        gate_bias, up_bias = jnp.split(one.w13_bias, 2)
        gate, up = gate + gate_bias, up + up_bias

    h = activate(gate, up, activation)
    if not recipe.quantized_activations:
        h = h.astype(dtype)
    h, h_scale = _input(h, one.w2_input_scale, recipe)
    y = _dot(h, _unscaled(one.w2, one.w2_scale, one.format)) * (h_scale * one.w2_global_scale)
    return y + one.w2_bias if one.w2_bias.size else y


def dense_mlp(x: jax.Array, expert: DenseExpert, *, activation: Activation = SILU) -> jax.Array:
    """Returns the dense MLP's output; see :func:`jax_b12x.moe.dense_mlp`.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``.
      expert: the weights.
      activation: between the two products.

    Returns:
      ``x.dtype[num_tokens, hidden]``.

    Raises:
      TypeError: an argument is of another type.
    """
    check_array("x", x)
    check_kind("expert", expert, DenseExpert, "a DenseExpert")
    check_kind("activation", activation, Activation, "an Activation, such as moe.SILU")
    w13, w2 = expert.w13.astype(jnp.float32), expert.w2.astype(jnp.float32)
    product = _dot(x.astype(jnp.float32), w13)
    if expert.w13_bias is not None:
        product = product + expert.w13_bias
    gate, up = jnp.split(product, 2, axis=1)
    # XLA may leave out a rounding that is widened again, except across a barrier.
    h = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call, unused-ignore]
        activate(gate, up, activation).astype(x.dtype)
    )
    y = _dot(h.astype(jnp.float32), w2)
    if expert.w2_bias is not None:
        y = y + expert.w2_bias
    if expert.shared_gate is not None:
        gate_row = expert.shared_gate.astype(jnp.float32)[None, :]
        y = y * jax.nn.sigmoid(_dot(x.astype(jnp.float32), gate_row))
    return y.astype(x.dtype)


def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Applies ``activation`` in fp32; see :class:`~jax_b12x.moe.recipe.Activation`."""
    if activation.kind == "silu":
        return gate * jax.nn.sigmoid(gate) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)


def _input(x: jax.Array, global_scale: jax.Array, recipe: Recipe) -> tuple[jax.Array, jax.Array]:
    """Returns the values that are multiplied, and what the product's sum is scaled with."""
    if not recipe.quantized_activations:
        return x.astype(jnp.float32), jnp.float32(1)
    usable = jnp.isfinite(global_scale) & (global_scale > 0)
    quantized = nvfp4.quantize(x, global_scale)
    values = nvfp4.dequantize(quantized, apply_global_scale=False)
    return values, jnp.where(usable, global_scale, jnp.float32(0))


def _unscaled(packed: jax.Array, scale: jax.Array, weight_format: WeightFormat) -> jax.Array:
    """Returns ``e2m1 * block scale`` of one expert's matrix; its global scale is applied later."""
    tensor = QuantizedTensor(packed, scale, jnp.float32(1), weight_format)
    if weight_format == "nvfp4":
        return nvfp4.dequantize(tensor, apply_global_scale=False)
    return mxfp4.dequantize(tensor)


def _dot(a: jax.Array, w: jax.Array) -> jax.Array:
    # Without the barrier XLA's CPU compiler fuses what made the operands into the product, and
    # makes them again for each of its elements when there is one token.
    a, w = jax.lax.optimization_barrier((a, w))  # type: ignore[no-untyped-call, unused-ignore]
    return jnp.matmul(a, w.T, precision=jax.lax.Precision.HIGHEST)
