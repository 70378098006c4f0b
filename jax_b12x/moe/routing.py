"""Routing: which experts each token goes to, and with what weight.

Everything is computed in fp32. Equal scores go to the expert with the lowest index. A padding token
gets
the padding route: every id -1 and every weight 0, so that the experts leave it out. A token with a
NaN among its logits gets valid ids and NaN weights, so that the NaN shows in its output and in no
other. An infinite logit is an ordinary largest or smallest score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PADDING = -1


def softmax_topk(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    num_valid_tokens: jax.typing.ArrayLike | None = None,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Routes each token to the experts of its largest softmax probabilities.

    With ``renormalize`` the chosen probabilities are divided by their sum, which is the same as a
    softmax over the chosen logits (Mixtral, Qwen3, GPT-OSS); without it they are those of the
    softmax over all experts (OLMoE, Qwen2-MoE).

    Args:
      logits: ``[num_tokens, num_experts]``, of any floating-point dtype.
      top_k: routes a token.
      renormalize: whether the weights of a token sum to 1.
      num_valid_tokens: ``int32[]``; tokens from this one on are padding.
      token_mask: ``bool[num_tokens]``; tokens where it is false are padding.

    Returns:
      ``topk_ids: int32[num_tokens, top_k]``, largest first, and
      ``topk_weights: float32[num_tokens, top_k]``.

    Raises:
      ValueError: a shape, dtype or ``top_k`` is wrong; the message names the argument.
    """
    logits, valid, nan = _check(logits, top_k, num_valid_tokens, token_mask)
    chosen, ids = lax.top_k(logits, top_k)
    weights = _softmax(chosen) if renormalize else _take(_softmax(logits), ids)
    return _finish(ids, weights, valid, nan)


def sigmoid_topk(
    logits: jax.Array,
    top_k: int,
    *,
    correction_bias: jax.Array | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    num_valid_tokens: jax.typing.ArrayLike | None = None,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Routes by sigmoid scores, with a correction bias and within limited groups of experts.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.1.2, and the
    model code published with it; GLM-4.5 routes in the same way. The bias takes part in choosing
    and not in the weights. Experts lie in ``num_groups`` equal groups; a group's score is the sum
    of its two largest biased scores, and only experts of the ``topk_groups`` best groups may be
    chosen. Weights are the sigmoids of the chosen, divided by their sum plus 1e-20
    (``renormalize``), and multiplied with ``routed_scaling_factor``.

    Args:
      logits: ``[num_tokens, num_experts]``, of any floating-point dtype.
      top_k: routes a token.
      correction_bias: ``[num_experts]``, added to the scores for choosing
        (``e_score_correction_bias``); a NaN in it makes every weight NaN.
      num_groups: groups of experts (``n_group``).
      topk_groups: groups that a token may use (``topk_group``).
      renormalize: whether a token's weights are divided by their sum (``norm_topk_prob``).
      routed_scaling_factor: what the weights are multiplied with in the end.
      num_valid_tokens: ``int32[]``; tokens from this one on are padding.
      token_mask: ``bool[num_tokens]``; tokens where it is false are padding.

    Returns:
      ``topk_ids: int32[num_tokens, top_k]``, best first, and
      ``topk_weights: float32[num_tokens, top_k]``.

    Raises:
      ValueError: a shape, dtype, ``top_k`` or group count is wrong; the message names the argument.
    """
    logits, valid, nan = _check(logits, top_k, num_valid_tokens, token_mask)
    num_tokens, num_experts = logits.shape
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"num_groups is {num_groups}; it must divide the {num_experts} experts of logits"
        )
    group_size = num_experts // num_groups
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups is {topk_groups}; it must be within [1, {num_groups}]")
    if top_k > topk_groups * group_size:
        raise ValueError(
            f"top_k is {top_k}; {topk_groups} groups of {group_size} experts offer no more than "
            f"{topk_groups * group_size}"
        )
    scores = jax.nn.sigmoid(logits)
    biased = scores
    if correction_bias is not None:
        if correction_bias.shape != (num_experts,):
            raise ValueError(
                f"correction_bias has shape {correction_bias.shape}; it must be ({num_experts},)"
            )
        biased = scores + correction_bias.astype(jnp.float32)
        nan |= jnp.any(jnp.isnan(biased), axis=-1)
        biased = jnp.where(nan[:, None], 0, biased)
    if topk_groups < num_groups:
        groups = biased.reshape(num_tokens, num_groups, group_size)
        group_scores = jnp.sum(lax.top_k(groups, min(2, group_size))[0], axis=-1)
        best = lax.top_k(group_scores, topk_groups)[1]
        allowed = jnp.any(best[:, :, None] == jnp.arange(num_groups), axis=1)
        biased = jnp.where(jnp.repeat(allowed, group_size, axis=1), biased, -jnp.inf)
    ids = lax.top_k(biased, top_k)[1]
    weights = _take(scores, ids)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return _finish(ids, weights * jnp.float32(routed_scaling_factor), valid, nan)


def _check(
    logits: jax.Array,
    top_k: int,
    num_valid_tokens: jax.typing.ArrayLike | None,
    token_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the logits in fp32, finite and without -0; valid tokens; tokens that had a NaN."""
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; it must be [num_tokens, num_experts]")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits has dtype {logits.dtype.name}; it must be a floating-point dtype")
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be within [1, {num_experts}], the experts")
    logits = logits.astype(jnp.float32)
    nan = jnp.any(jnp.isnan(logits), axis=-1)
    valid = jnp.ones(num_tokens, jnp.bool_)
    if num_valid_tokens is not None:
        valid &= jnp.arange(num_tokens) < jnp.asarray(num_valid_tokens)
    if token_mask is not None:
        if token_mask.shape != (num_tokens,) or token_mask.dtype != jnp.bool_:
            raise ValueError(
                f"token_mask is {token_mask.dtype.name}{list(token_mask.shape)}; it must be "
                f"bool[{num_tokens}]"
            )
        valid &= token_mask
    largest = float(np.finfo(np.float32).max)
    logits = jnp.where(nan[:, None], 0, jnp.clip(logits, -largest, largest))
    # top_k orders -0 below +0: they must tie.
    return jnp.where(logits == 0, 0, logits), valid, nan


def _softmax(logits: jax.Array) -> jax.Array:
    exponentials = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)


def _take(scores: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(scores, ids, axis=-1)


def _finish(
    ids: jax.Array, weights: jax.Array, valid: jax.Array, nan: jax.Array
) -> tuple[jax.Array, jax.Array]:
    valid, nan = valid[:, None], nan[:, None]
    weights = jnp.where(valid, jnp.where(nan, jnp.nan, weights), 0)
    return jnp.where(valid, ids, PADDING).astype(jnp.int32), weights
