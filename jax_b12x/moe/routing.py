"""Routing: which experts each token goes to, and with what weight.

Everything is computed in fp32. Equal scores go to the expert with the lowest index. A padding token
gets the padding route: every id -1 and every weight 0, so that the experts leave it out. A token
with a NaN among its logits gets valid ids and NaN weights, so that the NaN shows in its output and
in no other. An infinite logit is an ordinary largest or smallest score.

:func:`softmax_topk` and :func:`sigmoid_topk` route by logits, in plain ``jnp``; :func:`route` makes
the logits as well, in one FFI call.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_b12x import _native
from jax_b12x.arguments import as_array, check_array, check_integer, number
from jax_b12x.moe import checks, planner
from jax_b12x.moe.token_call import absent_as_scalar, token_call

TARGET = "b12x_router"
PADDING = -1
MAX_EXPERTS = 1024
MAX_TOP_K = 16
MAX_GROUPS = 32

Scoring = Literal["softmax", "sigmoid"]

_BLOCK = 16
# Tokens for which the CPU's scratch is made, at most.
_MAX_TOKENS = 64


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
    factor = number("routed_scaling_factor", routed_scaling_factor)
    checks.check_groups(num_experts, top_k, num_groups, topk_groups)
    group_size = num_experts // num_groups
    scores = jax.nn.sigmoid(logits)
    biased = scores
    if correction_bias is not None:
        check_array("correction_bias", correction_bias)
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
    return _finish(ids, weights * jnp.float32(factor), valid, nan)


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    num_joined: int = 0,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Multiplies tokens with a router's weights and chooses their experts, in one FFI call.

    It is made for decode: on an NVIDIA GPU 1 to 8 tokens take one group of CTAs and more tokens one
    for each 8; for a prefill, a matrix product of XLA before :func:`softmax_topk` is faster. It
    works under ``jit``, inside ``shard_map``, and under ``vmap`` over tokens. It has no derivative:
    differentiate :func:`route_reference`.

    Given its logits, ids are those of :func:`softmax_topk` or :func:`sigmoid_topk`, and weights
    differ from theirs by at most ``(top_k + 8) * 2**-23`` of their size, and by
    ``(num_experts + 8) * 2**-23`` where a softmax over all experts is not renormalized: the
    exponential function and the order of a sum are the implementation's own. Sigmoid scores that
    differ by less than two units in the last place may be ordered either way.

    Args:
      x: ``f32|bf16|f16[num_tokens, hidden]``; ``hidden`` is a multiple of 16.
      weight: ``f32|bf16|f16[num_experts, hidden]``, at most 1024 experts.
      bias: ``float32[num_experts]``. With ``softmax`` it is added to the logits (GPT-OSS); with
        ``sigmoid`` it is the correction bias, which takes part in choosing only (DeepSeek-V3).
      top_k: routes a token, at most 16.
      scoring: ``"softmax"`` or ``"sigmoid"``.
      renormalize: whether a token's weights are divided by their sum.
      scale: what the weights are multiplied with in the end (``routed_scaling_factor``).
      num_groups: groups of experts, at most 32; only with ``sigmoid``.
      topk_groups: groups that a token may use; only with ``sigmoid``.
      num_joined: experts behind those of the router, to which every token goes with weight 1,
        padding as well: a shared expert that is joined to the routed ones. At most 16 routes a
        token and 1024 experts with them.
      token_mask: ``bool[num_tokens]``; tokens where it is false are padding.

    Returns:
      ``topk_ids: int32[num_tokens, top_k + num_joined]``, best first and the joined ones last,
      ``topk_weights: float32[num_tokens, top_k + num_joined]`` and
      ``logits: float32[num_tokens, num_experts]``, accumulated in fp32.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape or is out of range.
      NativeError: the extension is not built.
    """
    options = _Options(
        top_k, scoring, renormalize, number("scale", scale), num_groups, topk_groups, num_joined
    )
    _check_route(x, weight, bias, options, token_mask)
    if x.shape[0] == 0:
        return (
            jnp.zeros((0, top_k + num_joined), jnp.int32),
            jnp.zeros((0, top_k + num_joined), jnp.float32),
            jnp.zeros((0, weight.shape[0]), jnp.float32),
        )
    ids, weights, logits = _route_call(options)((x, token_mask), (weight, bias))
    return ids, weights, logits


def route_reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    num_joined: int = 0,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what :func:`route` does, in plain ``jnp``."""
    check_array("x", x)
    check_array("weight", weight)
    if bias is not None:
        check_array("bias", bias)
    check_integer("num_joined", num_joined)
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is {scoring!r}; it must be 'softmax' or 'sigmoid'")
    factor = number("scale", scale)
    logits = jnp.matmul(
        x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST
    )
    if scoring == "softmax":
        if bias is not None:
            logits = logits + bias
        ids, weights = softmax_topk(logits, top_k, renormalize=renormalize, token_mask=token_mask)
        weights = weights * jnp.float32(factor)
    else:
        ids, weights = sigmoid_topk(
            logits,
            top_k,
            correction_bias=bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalize=renormalize,
            routed_scaling_factor=factor,
            token_mask=token_mask,
        )
    return *with_joined(ids, weights, weight.shape[0], num_joined), logits


def with_joined(
    topk_ids: jax.Array, topk_weights: jax.Array, first: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns routes with one more to each of the experts ``[first, first + count)``, weight 1.

    Args:
      topk_ids: ``int32[num_tokens, top_k]``.
      topk_weights: ``float32[num_tokens, top_k]``.
      first: the first expert that every token goes to.
      count: how many there are.
    """
    check_array("topk_ids", topk_ids)
    check_array("topk_weights", topk_weights)
    check_integer("first", first)
    check_integer("count", count)
    if count == 0:
        return topk_ids, topk_weights
    # Made of the routes, so that inside shard_map they vary as those do.
    ids = jnp.zeros_like(topk_ids[:, :1]) + jnp.arange(first, first + count, dtype=jnp.int32)
    return (
        jnp.concatenate([topk_ids, ids], axis=1),
        jnp.concatenate([topk_weights, jnp.ones_like(ids, jnp.float32)], axis=1),
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    top_k: int
    scoring: Scoring
    renormalize: bool
    scale: float
    num_groups: int
    topk_groups: int
    num_joined: int = 0


@functools.lru_cache(maxsize=64)
def _route_call(options: _Options) -> Any:
    return token_call(
        "route",
        "differentiate jax_b12x.moe.routing.route_reference",
        functools.partial(_run_route, options),
    )


def _scratch_bytes(num_tokens: int, hidden: int, num_experts: int) -> int:
    """Returns the scratch that a call needs, in bytes."""
    return 4 * min(num_tokens, _MAX_TOKENS) * (hidden + 2 * num_experts)


def _run_route(
    options: _Options,
    tokens: tuple[jax.Array, jax.Array | None],
    weights: tuple[jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _native.ensure_registered()
    (x, token_mask), (weight, bias) = tokens, weights
    num_tokens, hidden = x.shape
    num_experts = weight.shape[0]
    routes = options.top_k + options.num_joined
    results = (
        # Inside shard_map they vary as x does.
        jax.typeof(x).update(shape=(num_tokens, routes), dtype=jnp.dtype(jnp.int32)),
        jax.typeof(x).update(shape=(num_tokens, routes), dtype=jnp.dtype(jnp.float32)),
        jax.typeof(x).update(shape=(num_tokens, num_experts), dtype=jnp.dtype(jnp.float32)),
        jax.core.ShapedArray((_scratch_bytes(num_tokens, hidden, num_experts),), jnp.uint8),
    )
    ids, route_weights, logits, _ = jax.ffi.ffi_call(TARGET, results)(
        x,
        weight,
        absent_as_scalar(bias),
        absent_as_scalar(token_mask),
        scoring=options.scoring,
        renormalize=options.renormalize,
        scale=np.float32(options.scale),
        num_groups=np.int64(options.num_groups),
        topk_groups=np.int64(options.topk_groups),
        num_joined=np.int64(options.num_joined),
    )
    return ids, route_weights, logits


def _check_route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    options: _Options,
    token_mask: jax.Array | None,
) -> None:
    for name, array, shape in (
        ("x", x, "[num_tokens, hidden]"),
        ("weight", weight, "[num_experts, hidden]"),
    ):
        check_array(name, array)
        if array.dtype.name not in planner.DTYPES:
            raise TypeError(
                f"{name} has dtype {array.dtype.name}; it must be {_list(planner.DTYPES)}"
            )
        if len(array.shape) != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    hidden, num_experts = x.shape[1], weight.shape[0]
    if hidden < _BLOCK or hidden % _BLOCK:
        raise ValueError(f"x has shape {x.shape}; hidden must be a positive multiple of {_BLOCK}")
    if weight.shape[1] != hidden:
        raise ValueError(
            f"weight has shape {weight.shape}; its rows must have the {hidden} columns of x"
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"weight has {num_experts} rows; the experts must be within [1, {MAX_EXPERTS}]"
        )
    for field in ("top_k", "num_groups", "topk_groups", "num_joined"):
        check_integer(field, getattr(options, field))
    if not isinstance(options.renormalize, (bool, np.bool_)):
        raise TypeError(f"renormalize is {options.renormalize!r}; it must be True or False")
    most = min(MAX_TOP_K, num_experts)
    if not 1 <= options.top_k <= most:
        raise ValueError(
            f"top_k is {options.top_k}; it must be within [1, {most}], for {num_experts} experts"
        )
    for name, value, limit in (
        ("top_k", options.top_k, MAX_TOP_K),
        ("num_experts", num_experts, MAX_EXPERTS),
    ):
        if not 0 <= options.num_joined <= limit - value:
            raise ValueError(
                f"num_joined is {options.num_joined}; it must be within [0, {limit - value}], for "
                f"{name} {value} of at most {limit}"
            )
    if bias is not None:
        check_array("bias", bias)
        if bias.dtype != jnp.float32:
            raise TypeError(f"bias has dtype {bias.dtype.name}; it must be float32")
        if bias.shape != (num_experts,):
            raise ValueError(f"bias has shape {bias.shape}; it must be ({num_experts},)")
    if token_mask is not None:
        checks.check_token_mask(token_mask, x.shape[0])
    if options.scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring is {options.scoring!r}; it must be 'softmax' or 'sigmoid'")
    if options.scoring == "softmax" and (options.num_groups, options.topk_groups) != (1, 1):
        raise ValueError(
            f"num_groups is {options.num_groups} and topk_groups {options.topk_groups}; with "
            "scoring 'softmax' both must be 1"
        )
    if options.num_groups > MAX_GROUPS:
        raise ValueError(f"num_groups is {options.num_groups}; it must be at most {MAX_GROUPS}")
    checks.check_groups(num_experts, options.top_k, options.num_groups, options.topk_groups)


def _list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _check(
    logits: jax.Array,
    top_k: int,
    num_valid_tokens: jax.typing.ArrayLike | None,
    token_mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the logits in fp32, finite and without -0; valid tokens; tokens that had a NaN."""
    check_array("logits", logits)
    check_integer("top_k", top_k)
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
        count = as_array("num_valid_tokens", num_valid_tokens)
        if count.shape or not jnp.issubdtype(count.dtype, jnp.integer):
            raise ValueError(
                f"num_valid_tokens is {count.dtype.name}{list(count.shape)}; it must be one "
                "integer: tokens from it on are padding (token_mask says it token by token)"
            )
        valid &= jnp.arange(num_tokens) < count
    if token_mask is not None:
        checks.check_token_mask(token_mask, num_tokens)
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
