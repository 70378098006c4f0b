"""Routed experts as Flax NNX modules: one to train, one to serve, with the same call.

Both are called as ``experts(x, topk_ids, topk_weights)``, so that a model is trained with
:class:`TrainableExperts` and served with :class:`PackedExperts` without another change.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jax_b12x import moe
from jax_b12x.moe.recipe import RecipeName

FakeQuantize = Callable[[jax.Array], jax.Array]


class TrainableExperts(nnx.Module):
    """Experts in full precision, with gradients, for training small models.

    Every expert computes every token and the routes select what is summed: at a few dozen small
    experts that is faster on an accelerator than sorting, it is differentiable, and it drops no
    token.

    Attributes:
      w13: ``float32[num_experts, 2 * intermediate, hidden]``; gate rows first, then up rows.
      w2: ``float32[num_experts, hidden, intermediate]``.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        fake_quantize_weight: FakeQuantize | None = None,
        fake_quantize_input: FakeQuantize | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes the experts with variance-scaled normal weights.

        Args:
          num_experts: how many experts.
          hidden: the width of the tokens.
          intermediate: the width between the two products.
          dtype: the dtype of the products; the parameters stay in float32.
          fake_quantize_weight: applied to ``w13`` and ``w2``, for quantization-aware training:
            rounds along the last axis and passes gradients through.
          fake_quantize_input: the same for what enters the two products.
          rngs: where the initial weights come from.
        """
        init = nnx.initializers.variance_scaling(
            1.0, "fan_in", "normal", in_axis=-1, out_axis=-2, batch_axis=0
        )
        self.num_experts = num_experts
        self.w13 = nnx.Param(
            init(rngs.params(), (num_experts, 2 * intermediate, hidden), jnp.float32)
        )
        self.w2 = nnx.Param(init(rngs.params(), (num_experts, hidden, intermediate), jnp.float32))
        self.dtype = dtype
        self.fake_quantize_weight = fake_quantize_weight or _identity
        self.fake_quantize_input = fake_quantize_input or _identity

    def __call__(self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array) -> jax.Array:
        """Returns the weighted sum of each token's experts.

        Args:
          x: ``[num_tokens, hidden]``.
          topk_ids: ``int32[num_tokens, top_k]``; an id outside the expert range contributes
            nothing.
          topk_weights: ``float32[num_tokens, top_k]``.

        Returns:
          ``[num_tokens, hidden]`` in ``x.dtype``.
        """
        # [num_tokens, num_experts]: a token's weight for every expert, zero where it is not routed.
        routed = jax.nn.one_hot(topk_ids, self.num_experts, dtype=jnp.float32)
        gains = jnp.einsum("tke,tk->te", routed, topk_weights)
        h = self.fake_quantize_input(self.intermediates(x)).astype(self.dtype)
        h = h * gains[..., None].astype(self.dtype)
        w2 = self.fake_quantize_weight(self.w2[...]).astype(self.dtype)
        return jnp.einsum("tei,ehi->th", h, w2).astype(x.dtype)

    def intermediates(self, x: jax.Array) -> jax.Array:
        """Returns what enters every expert's second product.

        Args:
          x: ``[num_tokens, hidden]``.

        Returns:
          ``[num_tokens, num_experts, intermediate]``.
        """
        a = self.fake_quantize_input(x).astype(self.dtype)
        w13 = self.fake_quantize_weight(self.w13[...]).astype(self.dtype)
        gate, up = jnp.split(jnp.einsum("th,eih->tei", a, w13), 2, axis=-1)
        return jax.nn.silu(gate) * up


class PackedExperts(nnx.Module):
    """Experts in packed 4-bit weights, computed by :func:`jax_b12x.moe.fused_moe`; inference only.

    The weights are no ``nnx.Param``, so that ``nnx.grad`` and ``nnx.Optimizer`` leave them out. A
    gradient with respect to ``x`` is an error.

    Attributes:
      weights: an ``nnx.Variable`` that holds the :class:`jax_b12x.moe.ExpertWeights`.
    """

    def __init__(self, weights: moe.ExpertWeights, *, recipe: RecipeName = "nvfp4") -> None:
        """Wraps the weights of one layer.

        Args:
          weights: from ``moe.load_experts``.
          recipe: the numeric contract, ``"nvfp4"`` or ``"w4a16"``.
        """
        self.weights = nnx.Variable(weights)
        self.recipe = recipe

    def __call__(self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array) -> jax.Array:
        """Returns the weighted sum of each token's experts; see :func:`jax_b12x.moe.fused_moe`."""
        weights: moe.ExpertWeights = self.weights.get_value()
        return moe.fused_moe(x, weights, topk_ids, topk_weights, recipe=self.recipe)


def _identity(x: jax.Array) -> jax.Array:
    return x
