"""What calls over a batch of tokens have in common under ``vmap`` and differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_b12x.moe.inference_only import without_derivative


def token_call(name: str, advice: str, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns ``run`` with a rule for ``vmap`` over tokens, and without a derivative.

    Args:
      name: what errors call it.
      advice: what to differentiate instead.
      run: takes a tree of arrays with an axis of tokens in front and a tree of weights, and returns
        arrays with an axis of tokens in front. It may be called with any number of tokens.
    """

    @jax.custom_batching.custom_vmap
    def batchable(tokens: Any, weights: Any) -> Any:
        return run(tokens, weights)

    @batchable.def_vmap  # type: ignore[untyped-decorator, unused-ignore]
    def over_tokens(axis_size: int, in_batched: Any, tokens: Any, weights: Any) -> tuple[Any, Any]:
        tokens_batched, weights_batched = in_batched
        if any(jax.tree.leaves(weights_batched)):
            raise ValueError(
                f"the weights of {name} are mapped by vmap; it works under vmap over tokens, with "
                "weights that are the same for all (in_axes None). jax.lax.cond with a mapped "
                "predicate maps what its branches use: take jnp.where"
            )

        def flat(array: jax.Array, batched: bool) -> jax.Array:
            if not batched:
                array = jnp.broadcast_to(array, (axis_size, *array.shape))
            return array.reshape(axis_size * array.shape[1], *array.shape[2:])

        out = batchable(jax.tree.map(flat, tokens, tokens_batched), weights)

        # The tokens of one item are stated, not -1: from an empty batch nothing can be inferred.
        pairs = zip(jax.tree.leaves(tokens), jax.tree.leaves(tokens_batched), strict=True)
        num_tokens = next(a.shape[1] if batched else a.shape[0] for a, batched in pairs)
        out = jax.tree.map(lambda a: a.reshape(axis_size, num_tokens, *a.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return without_derivative(name, advice, batchable)


def absent_as_scalar(array: jax.Array | None) -> jax.Array:
    """Returns ``array``, or the scalar that an FFI handler takes for an absent one."""
    return jnp.zeros((), jnp.float32) if array is None else array
