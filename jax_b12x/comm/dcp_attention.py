"""Attention over a KV cache whose tokens are dealt out to the ranks in turn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_b12x.comm import call, checks
from jax_b12x.comm.dcp import COMBINE_DTYPES, GATHER_DTYPES, dcp_combine, dcp_gather_heads
from jax_b12x.comm.pool import DcpPool

MAX_QUERY_TOKENS = 8


def dcp_attention(
    q: ArrayLike,
    k_shard: ArrayLike,
    v_shard: ArrayLike,
    kv_len: ArrayLike,
    pool: DcpPool,
    *,
    page_table: ArrayLike | None = None,
    scale: float | jax.Array | None = None,
    q_has_all_heads: bool = False,
) -> jax.Array:
    """Returns causal attention of the last tokens over a KV cache that is sharded over tokens.

    To be called inside ``shard_map``. Token ``t`` is on rank ``t % world_size``, there at position
    ``t // world_size``. The queries' heads are gathered, each rank attends over its shard with all
    heads (in plain ``jnp``, scores and softmax in fp32), and the partial outputs are combined.

    Args:
      q: bf16, fp16 or fp32 ``[batch, num_tokens, heads / world_size, head_dim]``: this rank's heads
        of the last 1 to 8 tokens.
      k_shard: bf16, fp16, fp32 or fp8 ``[batch, shard_tokens, kv_heads, head_dim]``: the keys of
        this rank's tokens, all heads; with a page table
        ``[num_pages, page_size, kv_heads, head_dim]``. ``heads`` is a multiple of ``kv_heads``.
      v_shard: like ``k_shard``, of the same dtype; its ``head_dim`` may be another.
      kv_len: ``int32[batch]`` or a scalar: tokens in the whole cache, the queries' own included.
        Query ``i`` sees the tokens up to ``kv_len - num_tokens + i``; where there are none, its
        result is 0.
      pool: the channels of the axis.
      page_table: ``int32[batch, shard_pages]``: the page of this rank's tokens from
        ``j * page_size`` on; entries behind the end of the cache may be anything.
      scale: of the scores, a number or a scalar array; by default ``head_dim ** -0.5``.
      q_has_all_heads: ``q`` is ``[batch, num_tokens, heads, head_dim]`` on every rank already, and
        is not gathered.

    Returns:
      ``[batch, num_tokens, heads / world_size, v's head_dim]`` of ``q``'s dtype: this rank's heads.

    Raises:
      TypeError: a dtype or the kind of pool is not allowed, or the call is differentiated.
      ValueError: shapes do not fit together, or as for :func:`dcp_combine`.
    """
    call.check_pool("dcp_attention", pool, DcpPool)
    q = checks.array("q", q)
    k, v = checks.array("k_shard", k_shard), checks.array("v_shard", v_shard)
    _check_dtypes(q, k, v)
    if q.ndim != 4 or not 1 <= q.shape[1] <= MAX_QUERY_TOKENS:
        raise ValueError(
            f"q must be [batch, num_tokens, heads, head_dim] with 1 to {MAX_QUERY_TOKENS} tokens, "
            f"not {q.shape}"
        )
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k_shard and v_shard must be [batch, tokens, kv_heads, head_dim] (paged: [pages, "
            f"page_size, ...]) with q's head_dim {q.shape[3]} in k_shard, not {k.shape} and "
            f"{v.shape}"
        )
    if page_table is not None:
        k, v = _pages(k, v, checks.array("page_table", page_table), q.shape[0])
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k_shard has batch {k.shape[0]}, q has {q.shape[0]}")
    heads = q.shape[2] if q_has_all_heads else q.shape[2] * pool.world_size
    if heads % k.shape[2]:
        raise ValueError(f"q has {heads} heads, no multiple of the {k.shape[2]} kv_heads")
    lengths = checks.array("kv_len", kv_len)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"kv_len must be int32, not {lengths.dtype}")
    lengths = lengths.astype(jnp.int32)
    if scale is not None and not (isinstance(scale, jax.Array) and scale.shape == ()):
        scale = checks.number("scale", scale)
    if lengths.shape not in ((), q.shape[:1]):
        raise ValueError(f"kv_len must be a scalar or [batch], not {lengths.shape}")
    if not q_has_all_heads:
        q = dcp_gather_heads(q, pool)
    rank = lax.axis_index(pool.topology.axes)
    shard = jnp.arange(k.shape[1], dtype=jnp.int32) * pool.world_size + rank
    out, lse = partial_attention(q, k, v, jnp.broadcast_to(lengths, q.shape[:1]), shard, scale)
    combined: jax.Array = dcp_combine(out, lse, pool)
    return combined


def _check_dtypes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, array, allowed in (
        ("q", q, COMBINE_DTYPES),
        ("k_shard", k, GATHER_DTYPES),
        ("v_shard", v, GATHER_DTYPES),
    ):
        if array.dtype.name not in allowed:
            raise TypeError(f"{name} must be {', '.join(allowed)}, not {array.dtype}")
    if k.dtype != v.dtype:
        raise TypeError(f"v_shard must have the dtype of k_shard, {k.dtype}, not {v.dtype}")


def _pages(k: Any, v: Any, table: Any, batch: int) -> tuple[Any, Any]:
    """Returns the pages of each sequence, one after another."""
    if table.ndim != 2 or table.shape[0] != batch or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"page_table must be int32[batch, shard_pages] with batch {batch}, not "
            f"{table.dtype}{table.shape}"
        )

    def gather(pages: Any) -> Any:
        taken = pages.at[table].get(mode="clip")
        return taken.reshape(batch, -1, *pages.shape[2:])

    return gather(k), gather(v)


def partial_attention(
    q: Any, k: Any, v: Any, kv_len: Any, position: Any, scale: float | jax.Array | None = None
) -> tuple[Any, Any]:
    """Returns attention over some of the tokens of a cache, and its log-sum-exp.

    Args:
      q: ``[batch, num_tokens, heads, head_dim]``: the last tokens.
      k: ``[batch, shard_tokens, kv_heads, head_dim]``.
      v: ``[batch, shard_tokens, kv_heads, v's head_dim]``.
      kv_len: ``int32[batch]``: tokens in the whole cache.
      position: ``int32[shard_tokens]``: which token of the cache each one is.
      scale: of the scores; by default ``head_dim ** -0.5``.

    Returns:
      ``[batch, num_tokens, heads, v's head_dim]`` of ``q``'s dtype, and
      ``f32[batch, num_tokens, heads]``: -inf where no token is seen.
    """
    batch, num_tokens, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    grouped = q.reshape(batch, num_tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.float32(scale) * jnp.einsum(
        "btkgd,bskd->btkgs",
        grouped,
        k.astype(q.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    query = kv_len[:, None] - num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    seen = position[None, None] <= query[..., None]
    scores = jnp.where(seen[:, :, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    some = jnp.isfinite(highest)
    shares = jnp.exp(scores - jnp.where(some, highest, 0))
    total = jnp.sum(shares, axis=-1, keepdims=True)
    # What is not written yet may hold anything.
    written = position[None] < kv_len[:, None]
    values = jnp.where(written[..., None, None], v.astype(jnp.float32), 0)
    out = jnp.einsum("btkgs,bskd->btkgd", shares, values, precision=lax.Precision.HIGHEST)
    out = out / jnp.where(some, total, 1)
    lse = jnp.where(some, highest + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return (
        out.reshape(batch, num_tokens, heads, v.shape[3]).astype(q.dtype),
        lse.reshape(batch, num_tokens, heads),
    )
