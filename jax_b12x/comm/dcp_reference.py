"""What ``dcp_combine`` means, in plain ``jnp``: the oracle, and what messages too large run."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax.numpy as jnp

LseBase = Literal["e", "2"]
LSE_BASES: tuple[LseBase, ...] = get_args(LseBase)


def combine(partials: Any, lses: Any, *, lse_base: LseBase = "e") -> tuple[Any, Any]:
    """Combines partial attention over shards of the keys.

    ::

        weight[r] = exp(lse[r] - max lse) / sum over ranks of exp(lse - max lse)
        out = sum over ranks of weight[r] * partial[r], rounded once

    in fp32, sums in rank order. A shard whose LSE is not finite is empty and counts as nothing,
    whatever its partial output holds. Where all are empty, the result is 0 and its LSE -inf.

    Args:
      partials: ``[world_size, ..., head_dim]``: the normalised output of each rank's shard.
      lses: ``f32[world_size, ...]``: the log of the sum of exponentials of its scores.
      lse_base: the base of the logarithm, ``"e"`` or ``"2"``.

    Returns:
      The attention over all shards, like ``partials[0]``, and its LSE, ``f32[...]``.
    """
    power, log = (jnp.exp, jnp.log) if lse_base == "e" else (jnp.exp2, jnp.log2)
    lses = lses.astype(jnp.float32)
    present = jnp.isfinite(lses)
    highest = jnp.max(jnp.where(present, lses, -jnp.inf), axis=0)
    some = jnp.any(present, axis=0)
    base = jnp.where(some, highest, 0)
    shares = jnp.where(present, power(lses - base), 0)
    ranks = range(lses.shape[0])
    total = jnp.zeros_like(base)
    for rank in ranks:
        total = total + shares[rank]
    total = jnp.where(some, total, 1)
    summed = jnp.zeros(partials.shape[1:], jnp.float32)
    for rank in ranks:
        weight = (shares[rank] / total)[..., None]
        term = weight * partials[rank].astype(jnp.float32)
        summed = summed + jnp.where(present[rank][..., None], term, 0)
    lse = jnp.where(some, base + log(total), -jnp.inf)
    return summed.astype(partials.dtype), lse
