"""The shared expert of many tokens, apart from the routed ones and in fp32 to the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_b12x.moe import reference
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.op import fused_moe
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.recipe import Activation
from jax_b12x.moe.weights import ExpertWeights


def dense(x: jax.Array, expert: DenseExpert, activation: Activation) -> jax.Array:
    """Returns ``f32[num_tokens, hidden]``: :func:`jax_b12x.moe.dense_mlp`, not rounded in the end.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``.
      expert: the weights, of the dtype of ``x``.
      activation: between the two products.
    """
    product = _dot(x, expert.w13)
    if expert.w13_bias is not None:
        product = product + expert.w13_bias
    gate, up = jnp.split(product, 2, axis=-1)
    y = _dot(reference.activate(gate, up, activation).astype(x.dtype), expert.w2)
    if expert.w2_bias is not None:
        y = y + expert.w2_bias
    if expert.shared_gate is not None:
        y = y * jax.nn.sigmoid(_dot(x, expert.shared_gate[None]))
    return y


def packed(x: jax.Array, expert: ExpertWeights, plan: MoePlan) -> jax.Array:
    """Returns ``f32[num_tokens, hidden]``: what a packed expert gives that every token goes to.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``.
      expert: one expert.
      plan: of it, for so many tokens.
    """
    ids = jnp.zeros_like(x[:, :1], jnp.int32)
    weights = jnp.ones_like(x[:, :1], jnp.float32)
    return fused_moe(x, expert, ids, weights, plan=plan).astype(jnp.float32)


def _dot(a: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``a @ w.T`` in fp32."""
    product: jax.Array = lax.dot_general(
        a,
        w,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return product
