"""The decoder and its multi-token-prediction head."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.flax_moe.attention import Attention, KVCache
from examples.flax_moe.config import ModelConfig
from jax_b12x.flax import MoE, MoELayer, Routing, SwiGLU
from jax_b12x.flax.moe import Experts

# Builds the routed experts of a layer; training and serving differ in nothing else.
MakeExperts = Callable[[int], Experts]


class Outputs(NamedTuple):
    """What the model says about a sequence.

    Attributes:
      logits: ``float32[..., num_tokens, vocab]``, for the token after each.
      hidden: ``[..., num_tokens, hidden]``, what the drafts start from.
      balance_loss: ``float32[]``, the mean over the layers; 0 of a model that serves.
    """

    logits: jax.Array
    hidden: jax.Array
    balance_loss: jax.Array


class Block(nnx.Module):
    """Attention, then a mixture of experts, each on the normalized residual stream."""

    def __init__(
        self, config: ModelConfig, experts: Experts, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Builds the block around its routed experts."""
        norm = {"epsilon": config.norm_epsilon, "dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(config.hidden, **norm)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.hidden, **norm)
        self.moe: MoE | MoELayer = MoE(
            config.hidden,
            config.num_experts,
            config.top_k,
            experts=experts,
            shared=SwiGLU(config.hidden, config.shared_intermediate, dtype=dtype, rngs=rngs),
            rngs=rngs,
        )

    def feed_forward(
        self, x: jax.Array, valid: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """Returns what the experts add, and where the tokens went where that is known.

        The layer that serves (``serving.py``) does not tell: it may route inside a kernel.
        """
        if isinstance(self.moe, MoELayer):
            return self.moe(x, valid), None
        y, route = self.moe(x, valid)
        return y, route


class DraftHead(nnx.Module):
    """Predicts the token after the next one and, applied to its own output, those that follow.

    One set of weights serves every depth. It sees the decoder's last hidden state and the embedding
    of each token decided since, and shares the decoder's embedding and output projection.

    Source: the multi-token prediction of DeepSeek-V3 (2024), without attention, as in Hydra (Ankner
      et al., 2024).
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        """Initializes the head."""
        norm = {"epsilon": config.norm_epsilon, "dtype": dtype, "rngs": rngs}
        self.state_norm = nnx.RMSNorm(config.hidden, **norm)
        self.token_norm = nnx.RMSNorm(config.hidden, **norm)
        self.join = nnx.Linear(
            2 * config.hidden, config.hidden, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(config.hidden, **norm)
        self.mlp = SwiGLU(config.hidden, config.draft_intermediate, dtype=dtype, rngs=rngs)
        self.output_norm = nnx.RMSNorm(config.hidden, **norm)

    def __call__(self, state: jax.Array, embedding: jax.Array) -> jax.Array:
        """Advances ``state: [..., hidden]`` by the token whose embedding is given."""
        x = self.join(
            jnp.concatenate([self.state_norm(state), self.token_norm(embedding)], axis=-1)
        )
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """A byte-level decoder with RMSNorm, RoPE, grouped-query attention and MoE layers."""

    def __init__(
        self,
        config: ModelConfig,
        make_experts: MakeExperts,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        """Initializes the parameters in float32.

        Args:
          config: the shape.
          make_experts: called with the layer's index; gives its routed experts.
          dtype: what the dense parts are computed in.
          dropout: the probability that a value of a block's contribution is dropped in training.
          rngs: where the initial weights come from.
        """
        self.config = config
        self.dtype = dtype
        self.embedding = nnx.Embed(config.vocab, config.hidden, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, make_experts(i), dtype=dtype, rngs=rngs) for i in range(config.layers)]
        )
        self.norm = nnx.RMSNorm(config.hidden, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.Linear(
            config.hidden, config.vocab, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.draft_head = DraftHead(config, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, tokens: jax.Array, *, rngs: nnx.Rngs | None = None) -> Outputs:
        """Reads ``tokens: [batch, num_tokens]`` from position 0.

        Args:
          tokens: integers below ``config.vocab``.
          rngs: for dropout; without it nothing is dropped.
        """

        def drop(y: jax.Array) -> jax.Array:
            return self.dropout(y, deterministic=rngs is None, rngs=rngs)

        x = drop(self.embed(tokens))
        balance = jnp.zeros((), jnp.float32)
        for block in self.blocks:
            x = x + drop(block.attention(block.attention_norm(x)))
            flat = block.moe_norm(x).reshape(-1, self.config.hidden)
            y, route = block.feed_forward(flat)
            x = x + drop(y.reshape(x.shape))
            if route is not None:
                balance += route.balance_loss() / self.config.layers
        return Outputs(self.predict(self.norm(x)), x, balance)

    def step(
        self, tokens: jax.Array, valid: jax.Array, position: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Reads the next tokens of one sequence.

        Args:
          tokens: ``int32[num_tokens]``.
          valid: ``bool[num_tokens]``; the rest fill up the static shape, come last, and mean
            nothing.
          position: ``int32[]``, where the first token is.
          cache: of the tokens before ``position``.

        Returns:
          ``logits: float32[num_tokens, vocab]``, ``hidden: [num_tokens, hidden]`` and the cache.
        """
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            y, cache = block.attention.step(block.attention_norm(x), position, cache, layer)
            x = x + y
            y, _ = block.feed_forward(block.moe_norm(x), valid)
            x = x + y
        return self.predict(self.norm(x)), x, cache

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeds by a product with one-hot rows.

        The gradient of a lookup adds thousands of rows to the same few of a 128-row table one after
        another, which on a GPU takes far longer than the rest of the step; a product has no such
        order.
        """
        return jax.nn.one_hot(
            tokens, self.config.vocab, dtype=self.dtype
        ) @ self.embedding.embedding[...].astype(self.dtype)

    def predict(self, normed: jax.Array) -> jax.Array:
        """Maps normalized hidden states to ``float32`` logits."""
        return self.unembedding(normed).astype(jnp.float32)

    def draft_logits(self, hidden: jax.Array, following: list[jax.Array]) -> list[jax.Array]:
        """Returns the logits of each draft, given the true tokens: what training needs.

        Args:
          hidden: ``[..., hidden]`` at position t.
          following: the tokens at t + 1, t + 2, ...: ``[...]`` each, one a draft.
        """
        logits = []
        for tokens in following:
            hidden = self.draft_head(hidden, self.embed(tokens))
            logits.append(self.predict(self.draft_head.output_norm(hidden)))
        return logits
