"""The JAX primitives of decode context parallelism: their types and their batching."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.interpreters import batching

from jax_b12x.comm import primitives
from jax_b12x.comm.memory import PACKET_BYTES, whole_lines
from jax_b12x.comm.pool import Pool

# bind(partial_out, lse, [token], heads_axis=..., base_two=..., return_lse=..., pool=..., ...)
combine_p = jax.extend.core.Primitive("b12x_dcp_combine")
# bind(a, [b], [token], heads_axis=..., second_axis=..., pool=..., ...); second_axis is -1 without b
gather_p = jax.extend.core.Primitive("b12x_dcp_gather")

_PART_BYTES = 32 * PACKET_BYTES


def combine_bytes(partial_out: Any, world_size: int) -> int:
    """Returns the bytes that a combine sends to one peer.

    For each part of a row (one token's head), of up to 512 bytes, a packet with its LSE; then, at a
    new line, the rows. ``cuda/comm/dcp_layout.h`` has the same numbers.
    """
    row_bytes = partial_out.shape[-1] * np.dtype(partial_out.dtype).itemsize
    rows = math.prod(partial_out.shape[:-1]) // world_size
    parts = rows * -(-row_bytes // _PART_BYTES)
    return int(whole_lines(parts * PACKET_BYTES) + rows * row_bytes)


def gather_bytes(*arrays: Any) -> int:
    """Returns the bytes that a gather sends to one peer: each array begins at a packet."""
    sizes = map(primitives.message_bytes, arrays)
    return sum(-(-size // PACKET_BYTES) * PACKET_BYTES for size in sizes)


def _resized(aval: Any, axis: int, size: int, varying: frozenset[str]) -> Any:
    shape = (*aval.shape[:axis], size, *aval.shape[axis + 1 :])
    return aval.update(
        shape=shape, manual_axis_type=aval.mat.update(varying=varying), weak_type=False
    )


def _combine_types(
    partial_out: Any, lse: Any, *token: Any, pool: Pool, heads_axis: Any, return_lse: Any, **_: Any
) -> list[Any]:
    axis = int(heads_axis)
    heads = partial_out.shape[axis] // pool.world_size
    differs = primitives.varying(partial_out) | primitives.varying(lse)
    results = [_resized(partial_out, axis, heads, differs)]
    if return_lse:
        results.append(_resized(lse, axis, heads, differs))
    return [*results, *token]


def _combine_message(partial_out: Any, *_: Any, pool: Pool, **__: Any) -> int:
    return combine_bytes(partial_out, pool.world_size)


def _gather_arrays(operands: Any, second_axis: Any) -> tuple[Any, Any]:
    count = 1 if int(second_axis) < 0 else 2
    return operands[:count], operands[count:]


def _gather_types(
    *operands: Any, pool: Pool, heads_axis: Any, second_axis: Any, **_: Any
) -> list[Any]:
    arrays, token = _gather_arrays(operands, second_axis)
    results = []
    for array, axis in zip(arrays, (int(heads_axis), int(second_axis)), strict=False):
        heads = array.shape[axis] * pool.world_size
        results.append(_resized(array, axis, heads, primitives.varying(array)))
    return [*results, *token]


def _gather_message(*operands: Any, second_axis: Any, **_: Any) -> int:
    return gather_bytes(*_gather_arrays(operands, second_axis)[0])


primitives.register(combine_p, _combine_types, "b12x_dcp_combine", _combine_message)
primitives.register(gather_p, _gather_types, "b12x_dcp_gather", _gather_message)


def _place_batch(array: Any, dim: Any, size: int) -> Any:
    """Puts the batch in front: more rows of the same heads."""
    return batching.bdim_at_front(array, dim, size)


def _batch_size(args: Any, dims: Any) -> int:
    (size,) = {array.shape[dim] for array, dim in zip(args, dims, strict=True) if dim is not None}
    return int(size)


def _batch_combine(args: Any, dims: Any, *, heads_axis: Any, **params: Any) -> Any:
    size = _batch_size(args[:2], dims[:2])
    arrays = [_place_batch(*each, size) for each in zip(args[:2], dims[:2], strict=True)]
    token = primitives.unbatched(args[2:], dims[2:])
    results = combine_p.bind(*arrays, *token, heads_axis=heads_axis + 1, **params)
    return results, [0] * (len(results) - len(token)) + [None] * len(token)


def _batch_gather(args: Any, dims: Any, *, heads_axis: Any, second_axis: Any, **params: Any) -> Any:
    arrays, rest = _gather_arrays(args, second_axis)
    count = len(arrays)
    size = _batch_size(arrays, dims[:count])
    arrays = [_place_batch(*each, size) for each in zip(arrays, dims[:count], strict=True)]
    token = primitives.unbatched(rest, dims[count:])
    results = gather_p.bind(
        *arrays,
        *token,
        heads_axis=heads_axis + 1,
        second_axis=second_axis if second_axis < 0 else second_axis + 1,
        **params,
    )
    return results, [0] * count + [None] * len(token)


batching.primitive_batchers[combine_p] = _batch_combine
batching.primitive_batchers[gather_p] = _batch_gather
