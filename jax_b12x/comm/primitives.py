"""The JAX primitives of channel calls: their types, their batching, and what they lower to.

A primitive's parameters are the pool, the lane and the op's own numbers; what depends on shapes is
computed when it is lowered, so that batching needs no care. The lowered call has values only: the
pool's name and layout, the program's name and the call site's number in it, the lane, the bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import numpy as np
from jax.interpreters import batching, mlir

from jax_b12x.comm import order
from jax_b12x.comm.memory import PACKET_BYTES

if TYPE_CHECKING:
    from jax_b12x.comm.pool import Pool

# The FFI targets that a program with collectives may call, those of `dcp_primitives` too: for
# `jax.export`'s safety checks.
TARGETS = (
    "b12x_all_reduce",
    "b12x_all_reduce_rms_norm",
    "b12x_dcp_combine",
    "b12x_dcp_gather",
    "b12x_open_order",
)

# bind(*arrays, [token], pool=..., lane=..., largest=..., **attributes); with `largest`, the call is
# part of an ordered program and takes its token as last operand
all_reduce_p = jax.extend.core.Primitive("b12x_all_reduce")
all_reduce_rms_norm_p = jax.extend.core.Primitive("b12x_all_reduce_rms_norm")
# bind(pool=..., lane=..., largest=..., token=...) -> token
open_order_p = jax.extend.core.Primitive("b12x_open_order")


def varying(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value differs; none where JAX does not track it."""
    return frozenset(aval.mat.varying)


def invariant_over(aval: Any, axes: Sequence[str]) -> Any:
    """Returns the abstract value of a result that is the same along ``axes``."""
    left = varying(aval) - set(axes)
    return aval.update(manual_axis_type=aval.mat.update(varying=left), weak_type=False)


def message_bytes(aval: Any) -> int:
    """Returns the bytes of an abstract value."""
    return int(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)


def row_message_bytes(aval: Any) -> int:
    """Returns the bytes of a message in which each row of an array begins at a packet."""
    *rows, hidden = aval.shape
    packets = -(-hidden * np.dtype(aval.dtype).itemsize // PACKET_BYTES)
    return int(math.prod(rows) * packets * PACKET_BYTES)


def open_order(pool: Pool, lane: str, largest: order.Largest) -> Any:
    """Takes the channel that an ordered program shares; returns its first token.

    It is called inside ``shard_map``.
    """
    manual = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    return open_order_p.bind(pool=pool, lane=lane, largest=largest, token=order.token_type(manual))


def _all_reduce_types(x: Any, *token: Any, pool: Pool, **_: Any) -> list[Any]:
    return [invariant_over(x, pool.topology.axes), *token]


def _rms_norm_types(
    x: Any,
    residual: Any,
    weight: Any,
    *token: Any,
    pool: Pool,
    **_: Any,
) -> list[Any]:
    del weight
    left = varying(x) - set(pool.topology.axes) | varying(residual)
    result = residual.update(manual_axis_type=residual.mat.update(varying=left), weak_type=False)
    return [result, result, *token]


def _lower(
    ctx: Any,
    *operands: Any,
    target: str,
    message: Message | None,
    pool: Pool,
    lane: str,
    largest: order.Largest | None = None,
    **attributes: Any,
) -> Any:
    """Lowers to the FFI call of ``target``, with what the runtime needs to find its channel.

    The call that has no message of its own opens an order.
    """
    _check_mesh(ctx, pool)
    pool.require_open()
    module = ctx.module_context.module
    opens = message is None
    ordered = largest is not None and not opens
    if message is not None:
        size = message(*ctx.avals_in, pool=pool, **attributes)
    else:
        # Everything is traced by now, so that the largest message of an order is known.
        assert largest is not None
        size = largest.bytes
    rule = jax.ffi.ffi_lowering(
        target,
        # The token's buffer is handed on in place: calls that share one cannot overlap.
        operand_output_aliases={len(operands) - 1: len(ctx.avals_out) - 1} if ordered else None,
        # Two orders of one program are two channels, though they begin alike.
        has_side_effect=opens,
    )
    return rule(
        ctx,
        *operands,
        pool=pool.name,
        world_size=np.int64(pool.world_size),
        layout=pool.topology.layout,
        program=str(module.operation.attributes["sym_name"]).strip('"'),
        # Counts the channels of a module: unlike for every call, alike on every rank.
        site=np.int64(ctx.module_context.new_channel()),
        lane=lane,
        op=target.removeprefix("b12x_"),
        bytes=np.int64(size),
        ordered=np.int64(ordered),
        **attributes,
    )


def _lower_open_order(ctx: Any, *, token: Any, **params: Any) -> Any:
    del token
    return _lower(ctx, target="b12x_open_order", message=None, **params)


def _check_mesh(ctx: Any, pool: Pool) -> None:
    """Refuses a program whose mesh has other devices, or another order, than its pool's."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    devices = getattr(mesh, "devices", None) if isinstance(mesh, jax.sharding.Mesh) else None
    if devices is not None and mesh != pool.topology.mesh:
        theirs = [device.id for device in devices.flat]
        ours = [device.id for device in pool.topology.mesh.devices.flat]
        if theirs != ours or devices.shape != pool.topology.mesh.devices.shape:
            raise ValueError(
                f"the program runs on a mesh of devices {theirs}, pool {pool.name!r} was made for "
                f"{ours}: make the pool for the program's mesh"
            )


# The bytes that a call puts into a slot of a peer, from its operands' types and its parameters.
Message = Callable[..., int]


def register(primitive: Any, types: Any, target: str, message: Message) -> None:
    """Makes a primitive a channel call.

    Args:
      primitive: it takes ``(*arrays, [token], pool=..., lane=..., largest=..., **attributes)``.
      types: from its operands' types and all of its parameters to its results' types, the token's
        included.
      target: the FFI target.
      message: from its operands' types, ``pool`` and the attributes to the bytes that a slot needs.
    """

    def types_and_size(*avals: Any, largest: order.Largest | None, **params: Any) -> list[Any]:
        if largest is not None:
            without_lane = {key: value for key, value in params.items() if key != "lane"}
            largest.bytes = max(largest.bytes, message(*avals, **without_lane))
        results: list[Any] = types(*avals, **params)
        return results

    primitive.multiple_results = True
    primitive.def_abstract_eval(types_and_size)
    # Every call site is lowered for itself, or two of them would be one.
    mlir.register_lowering(
        primitive, functools.partial(_lower, target=target, message=message), cacheable=False
    )


def _message_of_first(first: Any, *_: Any, **__: Any) -> int:
    return message_bytes(first)


def _rows_of_first(first: Any, *_: Any, **__: Any) -> int:
    return row_message_bytes(first)


register(all_reduce_p, _all_reduce_types, "b12x_all_reduce", _message_of_first)
register(all_reduce_rms_norm_p, _rms_norm_types, "b12x_all_reduce_rms_norm", _rows_of_first)
open_order_p.def_abstract_eval(lambda *, token, **_: token)
mlir.register_lowering(open_order_p, _lower_open_order, cacheable=False)


def _batch_all_reduce(args: Any, dims: Any, *, pool: Pool, **params: Any) -> Any:
    # The elements are independent of each other: a batch is a larger message.
    x, *token = args
    if message_bytes(jax.typeof(x)) > pool.cutoff:
        return [jax.lax.psum(x, pool.topology.axes), *token], list(dims)
    out, *token = all_reduce_p.bind(x, *unbatched(token, dims[1:]), pool=pool, **params)
    return [out, *token], [dims[0], *(None for _ in token)]


def unbatched(token: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """JAX may have made a batch of the token: so many copies of one, which then goes on alone."""
    return [
        each if dim is None else jax.lax.index_in_dim(each, 0, dim, keepdims=False)
        for each, dim in zip(token, dims, strict=True)
    ]


batching.primitive_batchers[all_reduce_p] = _batch_all_reduce


def _batch_rms_norm(args: Any, dims: Any, *, pool: Pool, **params: Any) -> Any:
    x, residual, weight, *token = args
    if dims[2] is not None:
        raise NotImplementedError(
            "vmap over the weight of all_reduce_rms_norm is not possible; over x and residual it is"
        )
    (size,) = {
        array.shape[dim] for array, dim in zip(args[:2], dims[:2], strict=True) if dim is not None
    }
    x, residual = (
        batching.bdim_at_front(array, dim, size)
        for array, dim in zip((x, residual), dims[:2], strict=True)
    )
    normed, new_residual, *token = all_reduce_rms_norm_p.bind(
        x, residual, weight, *unbatched(token, dims[3:]), pool=pool, **params
    )
    return [normed, new_residual, *token], [0, 0, *(None for _ in token)]


batching.primitive_batchers[all_reduce_rms_norm_p] = _batch_rms_norm
