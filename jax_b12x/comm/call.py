"""What every collective looks at before it takes a channel: mesh, cutoff, order, derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jax_b12x.comm import order as order_lib
from jax_b12x.comm import primitives
from jax_b12x.comm.memory import channel_bytes, lane_message_bytes
from jax_b12x.comm.pool import Pool


def check_pool(op: str, pool: Pool, kind: type[Pool]) -> None:
    """Refuses a pool of another kind.

    Raises:
      TypeError: ``pool`` is not a ``kind``.
    """
    if not isinstance(pool, kind):
        raise TypeError(f"{op}: pool must be a comm.{kind.__name__}, not {pool!r}")


def check_axes(op: str, pool: Pool) -> None:
    """Refuses a call outside a ``shard_map`` over the pool's mesh.

    Raises:
      ValueError: the pool's axes are not manual, or another axis is automatic.
      ChannelError: the pool is closed.
    """
    pool.require_open()
    mesh = jax.sharding.get_abstract_mesh()
    own = pool.topology.mesh
    if dict(mesh.shape) != dict(own.shape) or not set(pool.topology.axes) <= set(mesh.manual_axes):
        raise ValueError(
            f"{op} must be inside a shard_map over the pool's mesh {dict(own.shape)} with the axes "
            f"{pool.topology.axes} manual; here the mesh is {dict(mesh.shape)} with the manual "
            f"axes {tuple(mesh.manual_axes)}"
        )
    automatic = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if any(mesh.shape[name] > 1 for name in automatic):
        raise ValueError(
            f"{op} needs every axis of the mesh manual; {automatic} are not: leave axis_names out "
            "of shard_map, and name these axes in its specs"
        )


def takes_channel(op: str, message_bytes: int, pool: Pool) -> bool:
    """Returns whether a message goes through a channel: the one place that knows the cutoff.

    Raises:
      ValueError: it should, but a channel for it alone is larger than the pool's ``max_bytes``.
    """
    if pool.transport == "xla" or pool.world_size == 1 or message_bytes == 0:
        return False
    if message_bytes > pool.cutoff:
        return False
    capacity = lane_message_bytes(message_bytes) if pool.isolation == "lane" else message_bytes
    needed = channel_bytes(capacity, pool.world_size)
    if pool.max_bytes is not None and needed > pool.max_bytes:
        raise ValueError(
            f"{op} sends {message_bytes} bytes to a rank, for which a channel takes {needed} bytes "
            f"a rank, but pool {pool.name!r} has max_bytes={pool.max_bytes}: raise it, or set "
            f"cutoff below {message_bytes} (it is {pool.cutoff}) so that such messages take XLA's "
            "collective"
        )
    return True


def order_of(op: str, pool: Pool) -> order_lib.Order | None:
    """Returns the order that a call takes its turn in; none where nothing is shared.

    Raises:
      ValueError: call sites share a channel and the call is not inside ``pool.ordered()``.
    """
    if not pool.shares_channels:
        return None
    order = order_lib.current(pool)
    if order is None:
        raise ValueError(
            f"pool {pool.name!r} has {pool.isolation_text}, where call sites share a "
            f"channel in an order that the program enforces: put the body of shard_map, with this "
            f"{op}, inside `with pool.ordered():`"
        )
    return order


def vary(x: jax.Array, pool: Pool) -> jax.Array:
    """Marks ``x`` as differing along the pool's axes, as ``lax.psum`` does."""
    known = primitives.varying(jax.typeof(x))
    missing = tuple(axis for axis in pool.topology.axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def inference_only(op: str, instead: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(*args)``; differentiating it says that ``op`` has no derivative.

    Raises:
      TypeError: the call is differentiated; it names what to use ``instead``.
    """

    @jax.custom_jvp
    def guarded(*args: Any) -> Any:
        return function(*args)

    @guarded.defjvp
    def guarded_jvp(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{op} is inference-only and cannot be differentiated; train with {instead}"
        )

    return guarded(*args)
