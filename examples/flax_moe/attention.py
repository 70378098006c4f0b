"""Grouped-query attention with rotary positions and a key-value cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from examples.flax_moe.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one sequence, for every layer.

    A position that was written may be written again: to take tokens back, go on from an earlier
    position, and what lies behind it is overwritten before it is ever attended to.

    Attributes:
      keys: ``[layers, capacity, kv_heads, head_dim]``.
      values: as ``keys``.
    """

    keys: jax.Array
    values: jax.Array

    @classmethod
    def zeros(cls, config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> KVCache:
        """Returns an empty cache for ``config.context`` tokens and drafts that follow them."""
        shape = (config.layers, config.context + config.drafts, config.kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, layer: int, position: jax.Array, keys: jax.Array, values: jax.Array) -> KVCache:
        """Returns the cache with ``[num_tokens, kv_heads, head_dim]`` written at ``position``."""
        at = (layer, position, 0, 0)
        return KVCache(
            jax.lax.dynamic_update_slice(self.keys, keys[None].astype(self.keys.dtype), at),
            jax.lax.dynamic_update_slice(self.values, values[None].astype(self.values.dtype), at),
        )


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Applies rotary position embedding to ``x: [..., num_tokens, heads, head_dim]``.

    Source: Su et al., "RoFormer" (2021); the two halves of a head are rotated against each other.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention; queries and keys are normalized a head before they are rotated."""

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> None:
        """Initializes the projections."""
        self.config = config
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        self.qkv = nnx.Linear(
            config.hidden, queries + 2 * keys, use_bias=False, dtype=dtype, rngs=rngs
        )
        self.out = nnx.Linear(queries, config.hidden, use_bias=False, dtype=dtype, rngs=rngs)
        norm = {"epsilon": config.norm_epsilon, "dtype": dtype, "rngs": rngs}
        self.query_norm = nnx.RMSNorm(config.head_dim, **norm)
        self.key_norm = nnx.RMSNorm(config.head_dim, **norm)

    def _project(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = self.qkv(x).reshape(*x.shape[:-1], heads + 2 * kv_heads, head_dim)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=-2)
        q = rotate(self.query_norm(q), positions, self.config.rope_theta)
        k = rotate(self.key_norm(k), positions, self.config.rope_theta)
        return q, k, v

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attends within ``x: [batch, num_tokens, hidden]`` from position 0."""
        q, k, v = self._project(x, jnp.arange(x.shape[1]))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.reshape(*x.shape[:-1], -1))

    def step(
        self, x: jax.Array, position: jax.Array, cache: KVCache, layer: int
    ) -> tuple[jax.Array, KVCache]:
        """Attends from ``x: [num_tokens, hidden]`` at ``position`` and on to all that came before.

        Args:
          x: the next tokens of one sequence.
          position: ``int32[]``, where the first of them is.
          cache: of the tokens before ``position``.
          layer: which layer of the cache this is.

        Returns:
          The output ``[num_tokens, hidden]``, and the cache with the new tokens written.
        """
        num_tokens, capacity = x.shape[0], cache.keys.shape[1]
        positions = position + jnp.arange(num_tokens)
        q, k, v = self._project(x, positions)
        cache = cache.write(layer, position, k, v)
        q = q.reshape(num_tokens, self.config.kv_heads, -1, self.config.head_dim)
        scores = jnp.einsum("tkgd,skd->tkgs", q, cache.keys[layer]) * self.config.head_dim**-0.5
        seen = jnp.arange(capacity) <= positions[:, None]
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        y = jnp.einsum("tkgs,skd->tkgd", jax.nn.softmax(scores, axis=-1), cache.values[layer])
        return self.out(y.reshape(num_tokens, -1)), cache
