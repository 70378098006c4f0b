"""Lanes: named contexts, such as ``target`` and ``draft``, whose storage is never shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

DEFAULT = "default"

# JAX traces anew where the lane differs, so that a function that is jitted once and called in two
# lanes has a program in each.
_current = jax.make_user_context(DEFAULT)


@contextlib.contextmanager
def lane(name: str) -> Iterator[None]:
    """Puts what is traced inside into a lane.

    Channels and persistent workspaces of one lane are never used by a program of another one.

    Args:
      name: the lane's name, such as ``"target"`` or ``"draft"``.

    Raises:
      ValueError: it is not a name.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"lane must be a name such as 'target' or 'draft', not {name!r}")
    with _current(name):
        yield


def current() -> str:
    """Returns the name of the lane in force."""
    return str(_current.value)
