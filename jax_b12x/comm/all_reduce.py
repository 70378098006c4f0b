"""Sums over the ranks of a mesh axis: alone, and fused with what follows in a transformer layer."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_b12x import lanes
from jax_b12x.comm import call, checks, primitives
from jax_b12x.comm import order as order_lib
from jax_b12x.comm.memory import MAX_ROW_BYTES
from jax_b12x.comm.pool import ChannelPool

DTYPES = ("bfloat16", "float16", "float32")
_TRAIN_WITH = "all_reduce, a residual add and a norm"


def all_reduce(x: ArrayLike, pool: ChannelPool) -> jax.Array:
    """Returns the sum of ``x`` over the ranks of the pool's axis, on every rank.

    To be called inside ``shard_map``, in place of ``lax.psum(x, axis)``. The sum is taken in fp32
    in rank order and rounded once, so that every rank has the same bits and a rerun gives them
    again. Messages above ``pool.cutoff`` bytes, and all messages where the pool's transport is
    ``"xla"``, take ``lax.psum``, whose order of summation is XLA's. The derivative is
    ``lax.psum``'s.

    Args:
      x: bf16, fp16 or fp32 of any shape; the same shape on every rank. A Python number is fp32.
      pool: the channels of the axis; made for the mesh that the program runs on.

    Returns:
      An array like ``x``.

    Raises:
      TypeError: ``x`` has another dtype.
      ValueError: the call is not inside a ``shard_map`` over the pool's mesh, or it shares a
        channel (``isolation="executable"`` or ``"lane"``) and is not inside ``pool.ordered()``.
    """
    call.check_pool("all_reduce", pool, ChannelPool)
    x = checks.array("x", x)
    _check_dtype("x", x)
    call.check_axes("all_reduce", pool)
    if not call.takes_channel("all_reduce", primitives.message_bytes(jax.typeof(x)), pool):
        return _psum(x, pool)
    x = call.vary(x, pool)
    order = call.order_of("all_reduce", pool)
    static = _Static(pool, lanes.current(), None if order is None else order.largest)
    if order is None:
        return _all_reduce(static, x)  # type: ignore[no-any-return]
    out, token = _all_reduce_in_order(static, x, order.take())
    order.give_back(token)
    return out  # type: ignore[no-any-return]


def all_reduce_rms_norm(
    x: ArrayLike, residual: ArrayLike, weight: ArrayLike, eps: float, pool: ChannelPool
) -> tuple[jax.Array, jax.Array]:
    """Returns the norm of a layer's summed output plus residual, and the sum, in one launch.

    ::

        new_residual = (sum of x over the ranks, in fp32 in rank order) + residual, rounded once
        normed = new_residual * rsqrt(mean(new_residual**2, axis=-1) + eps) * weight, rounded once

    in fp32 throughout. It is inference-only. Messages above the cutoff, and rows above 128 KB, take
    ``lax.psum`` and the same arithmetic in ``jnp``.

    Args:
      x: bf16, fp16 or fp32 ``[..., hidden]``: this rank's part of the sum.
      residual: like ``x``; the same values on every rank.
      weight: ``[hidden]`` of the same dtype.
      eps: added to the mean of squares: 0 or more, known when the program is traced.
      pool: the channels of the axis.

    Returns:
      ``(normed, new_residual)``, both like ``x``.

    Raises:
      TypeError: the dtypes are not allowed or differ, or the call is differentiated.
      ValueError: shapes do not fit together, or as for :func:`all_reduce`.
    """
    call.check_pool("all_reduce_rms_norm", pool, ChannelPool)
    x, residual, weight, eps = check_norm(x, residual, weight, eps)
    call.check_axes("all_reduce_rms_norm", pool)
    row_fits = x.shape[-1] * x.dtype.itemsize <= MAX_ROW_BYTES
    message_bytes = primitives.row_message_bytes(jax.typeof(x))
    if not row_fits or not call.takes_channel("all_reduce_rms_norm", message_bytes, pool):
        wide = x.astype(jnp.float32)
        plain = functools.partial(add_rms_norm, eps=eps)
        normed, new_residual = call.inference_only(
            "all_reduce_rms_norm", _TRAIN_WITH, plain, _psum(wide, pool), residual, weight
        )
        return normed, new_residual
    x = call.vary(x, pool)
    order = call.order_of("all_reduce_rms_norm", pool)
    token = () if order is None else (order.take(),)
    bind = functools.partial(
        primitives.all_reduce_rms_norm_p.bind,
        pool=pool,
        lane=lanes.current(),
        largest=None if order is None else order.largest,
        eps=np.float32(eps),
    )
    normed, new_residual, *token = call.inference_only(
        "all_reduce_rms_norm", _TRAIN_WITH, bind, x, residual, weight, *token
    )
    if order is not None:
        order.give_back(*token)
    return normed, new_residual


class _Static:
    """What a call is made with, beside its arrays."""

    def __init__(self, pool: ChannelPool, lane: str, largest: order_lib.Largest | None):
        self.params = {"pool": pool, "lane": lane, "largest": largest}
        self.axes = pool.topology.axes


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _all_reduce(static: _Static, x: Any) -> Any:
    (out,) = primitives.all_reduce_p.bind(x, **static.params)
    return out


@_all_reduce.defjvp
def _all_reduce_jvp(static: _Static, primals: Any, tangents: Any) -> Any:
    return _all_reduce(static, *primals), lax.psum(tangents[0], static.axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _all_reduce_in_order(static: _Static, x: Any, token: Any) -> Any:
    out, token = primitives.all_reduce_p.bind(x, token, **static.params)
    return out, token


@_all_reduce_in_order.defjvp
def _all_reduce_in_order_jvp(static: _Static, primals: Any, tangents: Any) -> Any:
    return (
        _all_reduce_in_order(static, *primals),
        (lax.psum(tangents[0], static.axes), tangents[1]),
    )


def check_norm(
    x: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike,
    eps: float,
    *,
    weight_name: str = "weight",
) -> tuple[jax.Array, jax.Array, jax.Array, float]:
    """Checks what :func:`all_reduce_rms_norm` takes, and returns it as arrays and a number.

    Args:
      x: as there.
      residual: as there.
      weight: as there.
      eps: as there.
      weight_name: what the caller's argument is called.

    Raises: what :func:`all_reduce_rms_norm` raises for them.
    """
    x, residual = checks.array("x", x), checks.array("residual", residual)
    weight = checks.array(weight_name, weight)
    eps = checks.number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps must be 0 or more, not {eps!r}")
    _check_dtype("x", x)
    for name, array in (("residual", residual), (weight_name, weight)):
        if array.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, not {array.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., hidden], not a scalar")
    if residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {x.shape}, not {residual.shape}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{weight_name} must have the shape [hidden], {x.shape[-1:]}, not {weight.shape}"
        )
    return x, residual, weight, eps


def add_rms_norm(
    summed: jax.Array, residual: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Returns what :func:`all_reduce_rms_norm` returns, where ``summed`` is the sum already.

    Args:
      summed: bf16, fp16 or fp32 ``[..., hidden]``.
      residual: of the same shape.
      weight: ``[hidden]``.
      eps: added to the mean of squares.

    Returns:
      ``(normed, new_residual)``, both like ``residual``.

    Raises:
      TypeError: an argument is no array, or ``eps`` no number.
    """
    summed, residual = checks.array("summed", summed), checks.array("residual", residual)
    weight, eps = checks.array("weight", weight), checks.number("eps", eps)
    new_residual = (summed.astype(jnp.float32) + residual.astype(jnp.float32)).astype(
        residual.dtype
    )
    wide = new_residual.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.asarray(eps, jnp.float32))
    normed = (wide * scale * weight.astype(jnp.float32)).astype(residual.dtype)
    return normed, new_residual


def _check_dtype(name: str, array: jax.Array) -> None:
    if array.dtype.name not in DTYPES:
        raise TypeError(
            f"{name} must be {', '.join(DTYPES)}, not {array.dtype}; lax.psum sums other dtypes"
        )


def _psum(x: jax.Array, pool: ChannelPool) -> jax.Array:
    summed: jax.Array = lax.psum(x, pool.topology.axes)
    return summed
