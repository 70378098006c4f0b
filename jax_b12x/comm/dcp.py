"""The exchanges of decode context parallelism (DCP): the KV cache is sharded over tokens.

Each rank attends with every head over its own tokens. Before that it needs the queries of all heads
(:func:`dcp_gather_heads`); after it, each head's partial outputs come together on the rank that the
head belongs to (:func:`dcp_combine`). Each is one launch with one synchronisation.

Arrays have any number of axes of which the last is ``head_dim`` and one is the heads: by default
the one before it, ``[batch, heads, head_dim]``; ``heads_axis=0`` takes ``[heads, batch, head_dim]``
as it is, without a transpose. Rank ``r`` of ``world_size`` has the heads from
``r * heads / world_size`` on.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_b12x import lanes
from jax_b12x.comm import call, checks, dcp_primitives, dcp_reference
from jax_b12x.comm.dcp_reference import LSE_BASES, LseBase
from jax_b12x.comm.pool import DcpPool

COMBINE_DTYPES = ("bfloat16", "float16", "float32")
GATHER_DTYPES = (*COMBINE_DTYPES, "float8_e4m3fn", "float8_e5m2")
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 1024
_INSTEAD = "attention over whole sequences (all_gather, all_to_all)"


def dcp_combine(
    partial_out: ArrayLike,
    lse: ArrayLike,
    pool: DcpPool,
    *,
    lse_base: LseBase = "e",
    return_lse: bool = False,
    heads_axis: int = -2,
) -> Any:
    """Combines the ranks' partial attention; each rank gets its own heads.

    To be called inside ``shard_map``. The ranks' outputs are weighted by the softmax over ranks of
    their LSEs, in fp32 in rank order, and rounded once: ``dcp_reference.combine`` is the meaning. A
    shard whose LSE is -inf, +inf or NaN is empty and counts as nothing; where all are empty the
    result is 0, its LSE -inf. Messages above ``pool.cutoff`` bytes take ``lax.all_to_all`` and the
    same arithmetic in ``jnp``. It is inference-only.

    Args:
      partial_out: bf16, fp16 or fp32 ``[batch, heads, head_dim]``: every head's attention over this
        rank's tokens. ``heads`` is divisible by the ranks, ``head_dim`` a multiple of 8 up to 1024.
      lse: ``f32[batch, heads]``: the log-sum-exp of its scores.
      pool: the channels of the axis; made for the mesh that the program runs on.
      lse_base: the base of the logarithm and the exponential, ``"e"`` or ``"2"``.
      return_lse: whether to return the combined LSE as well.
      heads_axis: which axis of ``partial_out`` is the heads.

    Returns:
      ``[batch, heads / world_size, head_dim]`` like ``partial_out``, and with ``return_lse`` also
      ``f32[batch, heads / world_size]``.

    Raises:
      TypeError: a dtype or the kind of pool is not allowed, or the call is differentiated.
      ValueError: shapes do not fit together, or the call is not inside a ``shard_map`` over the
        pool's mesh, or it shares a channel and is not inside ``pool.ordered()``.
    """
    call.check_pool("dcp_combine", pool, DcpPool)
    partial_out, lse = checks.array("partial_out", partial_out), checks.array("lse", lse)
    if lse_base not in LSE_BASES:
        raise ValueError(f"lse_base must be one of {', '.join(LSE_BASES)}, not {lse_base!r}")
    axis = _check_heads("partial_out", partial_out, COMBINE_DTYPES, heads_axis)
    if lse.dtype != jnp.float32:
        raise TypeError(f"lse must be float32, not {lse.dtype}")
    if lse.shape != partial_out.shape[:-1]:
        raise ValueError(
            f"lse must have the shape of partial_out without head_dim, {partial_out.shape[:-1]}, "
            f"not {lse.shape}"
        )
    heads = partial_out.shape[axis]
    if heads % pool.world_size:
        raise ValueError(
            f"partial_out has {heads} heads (axis {axis}); they must be divisible by the "
            f"{pool.world_size} ranks"
        )
    call.check_axes("dcp_combine", pool)
    partial_out, lse = call.vary(partial_out, pool), call.vary(lse, pool)
    message_bytes = dcp_primitives.combine_bytes(partial_out, pool.world_size)
    if not call.takes_channel("dcp_combine", message_bytes, pool):
        by_xla = functools.partial(_combine_by_xla, pool=pool, axis=axis, lse_base=lse_base)
        out, total = call.inference_only("dcp_combine", _INSTEAD, by_xla, partial_out, lse)
        return (out, total) if return_lse else out
    bind = functools.partial(
        dcp_primitives.combine_p.bind,
        heads_axis=np.int64(axis),
        base_two=np.int64(lse_base == "2"),
        return_lse=np.int64(return_lse),
    )
    results = _in_channel("dcp_combine", bind, pool, partial_out, lse)
    return tuple(results) if return_lse else results[0]


def dcp_gather_heads(q: ArrayLike, pool: DcpPool, *, heads_axis: int = -2) -> jax.Array:
    """Gathers the heads of all ranks: the exchange of queries before the partial attention.

    To be called inside ``shard_map``. Bits are copied; only the sign and payload of a NaN may
    change. Messages above ``pool.cutoff`` bytes take ``lax.all_gather``. It is inference-only.

    Args:
      q: bf16, fp16, fp32, fp8 (e4m3fn, e5m2) ``[batch, heads / world_size, dim]``: this rank's
        heads. ``dim`` is a multiple of 8 up to 1024.
      pool: the channels of the axis.
      heads_axis: which axis of ``q`` is the heads.

    Returns:
      ``[batch, heads, dim]`` like ``q``, on every rank.

    Raises:
      TypeError: as for :func:`dcp_combine`.
      ValueError: as for :func:`dcp_combine`.
    """
    (gathered,) = _gather("dcp_gather_heads", {"q": q}, pool, heads_axis)
    return gathered


def dcp_gather_pair(
    a: ArrayLike, b: ArrayLike, pool: DcpPool, *, heads_axis: int = -2
) -> tuple[jax.Array, jax.Array]:
    """Gathers the heads of two tensors in one launch, such as MLA's query and its rotary part.

    Each is gathered as by :func:`dcp_gather_heads`; their dtypes and shapes may differ.

    Args:
      a: ``[batch, heads / world_size, dim]``, see :func:`dcp_gather_heads`.
      b: the second tensor.
      pool: the channels of the axis.
      heads_axis: which axis of each is the heads.

    Returns:
      The two gathered tensors.

    Raises:
      TypeError: as for :func:`dcp_combine`.
      ValueError: as for :func:`dcp_combine`.
    """
    first, second = _gather("dcp_gather_pair", {"a": a, "b": b}, pool, heads_axis)
    return first, second


def _gather(
    op: str, named: dict[str, ArrayLike], pool: DcpPool, heads_axis: int
) -> list[jax.Array]:
    call.check_pool(op, pool, DcpPool)
    arrays = [checks.array(name, array) for name, array in named.items()]
    axes = [
        _check_heads(name, array, GATHER_DTYPES, heads_axis)
        for name, array in zip(named, arrays, strict=True)
    ]
    call.check_axes(op, pool)
    arrays = [call.vary(array, pool) for array in arrays]
    if not call.takes_channel(op, dcp_primitives.gather_bytes(*arrays), pool):
        by_xla = functools.partial(_gather_by_xla, pool=pool, axes=axes)
        results: list[jax.Array] = call.inference_only(op, _INSTEAD, by_xla, *arrays)
        return results
    bind = functools.partial(
        dcp_primitives.gather_p.bind,
        heads_axis=np.int64(axes[0]),
        second_axis=np.int64(axes[1] if len(axes) > 1 else -1),
    )
    return _in_channel(op, bind, pool, *arrays)


def _in_channel(op: str, bind: Any, pool: DcpPool, *arrays: jax.Array) -> list[jax.Array]:
    """Binds a primitive, in its turn where call sites share a channel."""
    order = call.order_of(op, pool)
    bind = functools.partial(
        bind, pool=pool, lane=lanes.current(), largest=None if order is None else order.largest
    )
    if order is None:
        return list(call.inference_only(op, _INSTEAD, bind, *arrays))
    *results, token = call.inference_only(op, _INSTEAD, bind, *arrays, order.take())
    order.give_back(token)
    return list(results)


def _check_heads(name: str, array: jax.Array, dtypes: tuple[str, ...], heads_axis: int) -> int:
    """Checks an array of heads; returns which axis they are on, counted from the front."""
    if array.dtype.name not in dtypes:
        raise TypeError(f"{name} must be {', '.join(dtypes)}, not {array.dtype}")
    if array.ndim < 2:
        raise ValueError(
            f"{name} must have heads and head_dim, [..., heads, head_dim], not "
            f"the shape {array.shape}"
        )
    heads_axis = checks.integer("heads_axis", heads_axis)
    axis = heads_axis + array.ndim if heads_axis < 0 else heads_axis
    if not 0 <= axis < array.ndim - 1:
        raise ValueError(
            f"heads_axis={heads_axis} must be an axis of {name}, {array.shape}, other than the "
            "last, which is head_dim"
        )
    if array.shape[axis] == 0:
        raise ValueError(f"{name} has no heads: axis {axis} of {array.shape} must be 1 or more")
    head_dim = array.shape[-1]
    if head_dim == 0 or head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{name} has head_dim {head_dim}; it must be a multiple of {HEAD_DIM_STEP} from "
            f"{HEAD_DIM_STEP} to {MAX_HEAD_DIM}"
        )
    return axis


def _combine_by_xla(
    partial_out: Any, lse: Any, *, pool: DcpPool, axis: int, lse_base: LseBase
) -> tuple[Any, Any]:
    def exchange(array: Any) -> Any:
        shape = array.shape
        split = (pool.world_size, shape[axis] // pool.world_size)
        array = array.reshape(*shape[:axis], *split, *shape[axis + 1 :])
        if pool.world_size == 1:
            return jnp.moveaxis(array, axis, 0)
        return lax.all_to_all(array, pool.topology.axes, split_axis=axis, concat_axis=0)

    return dcp_reference.combine(exchange(partial_out), exchange(lse), lse_base=lse_base)


def _gather_by_xla(*arrays: Any, pool: DcpPool, axes: list[int]) -> list[Any]:
    return [
        lax.all_gather(array, pool.topology.axes, axis=axis, tiled=True)
        for array, axis in zip(arrays, axes, strict=True)
    ]
