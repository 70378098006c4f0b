"""Ordered programs: call sites share one channel, in an order that the program enforces.

A channel carries one message at a time. Where call sites share one (``isolation="executable"`` and
``"lane"``), each call takes a token from the call before it and hands it on: an array that the XLA
program really passes around. XLA cannot run two such calls at once or swap them, in whatever way it
schedules, unrolls or captures the program, because the second needs the first one's result. The
token also names the channel, so that a call cannot get at the channel without its turn.

The token lives in a mutable array (:func:`jax.new_ref`) that the traced code updates. JAX threads
such an array through ``scan``, ``cond``, ``while_loop`` and inner ``jit``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax_b12x.comm.pool import Pool

TOKEN_WORDS = 4


class Largest:
    """The largest message of an ordered program, in bytes: known once it is traced."""

    def __init__(self) -> None:
        self.bytes = 1


class Order:
    """The order of one program's calls on one pool, while the program is traced."""

    def __init__(self, pool: Pool, token: Any, largest: Largest):
        self.pool = pool
        self.largest = largest
        try:
            self._token: Any = jax.new_ref(token)
        except ValueError as error:  # JAX has them in traced programs alone
            raise ValueError(
                "pool.ordered() must be under jax.jit: calls that share a channel get their order "
                f"from the program that they are traced into (pool {pool.name!r})"
            ) from error

    def take(self) -> Any:
        """Returns the token: the caller's turn."""
        return self._token[...]

    def give_back(self, token: Any) -> None:
        """Hands the token on to the next call."""
        self._token[...] = token

    def close(self) -> None:
        """Lets go of the traced array."""
        self._token = None


# In JAX's cache keys: a jitted function that two programs call is traced in each of them.
_orders = jax.make_user_context(())


def current(pool: Pool) -> Order | None:
    """Returns the order in force for ``pool``, if there is one."""
    for order in reversed(_orders.value):
        if order.pool is pool:
            return order  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def ordered(pool: Pool, token: Any, largest: Largest) -> Iterator[None]:
    """Puts the calls that are traced inside into one order, beginning with ``token``."""
    order = Order(pool, token, largest)
    try:
        with _orders((*_orders.value, order)):
            yield
    finally:
        order.close()


def token_type(axes: tuple[str, ...]) -> Any:
    """Returns the abstract value of a token inside ``shard_map``: it differs from device to device.

    Args:
      axes: all manual axes of the mesh.
    """
    words = jnp.zeros((TOKEN_WORDS,), jnp.uint32)
    return jax.typeof(lax.pcast(words, axes, to="varying"))
