"""A mixture-of-experts block for Flax NNX: router, routed experts, shared expert."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jax_b12x.moe import routing


class Experts(Protocol):
    """What :class:`MoE` needs of its routed experts."""

    def __call__(self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array) -> jax.Array:
        """Returns ``[num_tokens, hidden]``: the weighted sum of each token's experts."""


class Routing(NamedTuple):
    """Where the tokens of one call go.

    Attributes:
      topk_ids: ``int32[num_tokens, top_k]``; -1 for padding.
      topk_weights: ``float32[num_tokens, top_k]``.
      probabilities: ``float32[num_tokens, num_experts]``, the softmax over all experts.
    """

    topk_ids: jax.Array
    topk_weights: jax.Array
    probabilities: jax.Array

    def balance_loss(self) -> jax.Array:
        """Returns the load-balance loss, 1 when all experts have the same load.

        Source: Fedus et al., "Switch Transformers" (2021), equation 4, over ``top_k`` routes.
        """
        num_experts = self.probabilities.shape[-1]
        routed = jax.nn.one_hot(self.topk_ids, num_experts, dtype=jnp.float32)
        load = routed.mean(axis=(0, 1))
        return num_experts * jnp.sum(load * self.probabilities.mean(axis=0))


class SwiGLU(nnx.Module):
    """A dense gated feed-forward network; the shared expert of an MoE block."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes the three projections; parameters in float32, products in ``dtype``."""
        self.gate_up = nnx.Linear(hidden, 2 * intermediate, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(intermediate, hidden, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to ``[..., hidden]``."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class MoE(nnx.Module):
    """Softmax top-k router, routed experts, and an optional shared expert that sees every token.

    Attributes:
      router: the linear map to one logit an expert, in float32.
      experts: the routed experts: ``TrainableExperts`` or ``PackedExperts``.
      shared: the shared expert, or ``None``.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        experts: Experts,
        shared: SwiGLU | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the router around the experts given."""
        self.router = nnx.Linear(hidden, num_experts, use_bias=False, dtype=jnp.float32, rngs=rngs)
        self.experts = experts
        self.shared = shared
        self.top_k = top_k

    def route(self, x: jax.Array, valid: jax.Array | None = None) -> Routing:
        """Chooses the experts of each token.

        Args:
          x: ``[num_tokens, hidden]``.
          valid: ``bool[num_tokens]``; the routes of other tokens are -1 and cost nothing.
        """
        logits = self.router(x.astype(jnp.float32))
        topk_ids, topk_weights = routing.softmax_topk(
            logits, self.top_k, renormalize=True, token_mask=valid
        )
        return Routing(topk_ids, topk_weights, jax.nn.softmax(logits))

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """Returns ``[num_tokens, hidden]`` in ``x.dtype``, and where the tokens went."""
        route = self.route(x, valid)
        y = self.experts(x, route.topk_ids, route.topk_weights)
        if self.shared is not None:
            y = y + self.shared(x).astype(y.dtype)
        return y, route
