"""What pools of channels and pools of workspaces share: they end, and are held until then."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

_serials = itertools.count(1)


def new_serial() -> int:
    """Returns a number that no other pool of this process has: names come again, it does not."""
    return next(_serials)


class PoolCheckpoint(Protocol):
    """A moment in the life of one pool."""

    @property
    def pool(self) -> str:
        """The pool's name."""

    @property
    def serial(self) -> int:
        """The pool's number."""


def check_checkpoint(
    checkpoint: PoolCheckpoint, kind: type[PoolCheckpoint], name: str, serial: int
) -> None:
    """Refuses to roll a pool back to what is no checkpoint of it.

    Args:
      checkpoint: what the caller has.
      kind: the class of the pool's checkpoints.
      name: the pool's name.
      serial: the pool's number.

    Raises:
      TypeError: it is no ``kind``.
      ValueError: it is another pool's; perhaps of one that had the same name.
    """
    if not isinstance(checkpoint, kind):
        raise TypeError(
            f"checkpoint must be what pool.checkpoint() returned, a {kind.__name__}, not "
            f"{checkpoint!r}"
        )
    if checkpoint.pool != name:
        raise ValueError(f"the checkpoint is of pool {checkpoint.pool!r}, not of {name!r}")
    if checkpoint.serial != serial:
        raise ValueError(
            f"the checkpoint is of another pool that was named {name!r}, not of this one: take "
            "checkpoints of the pool that is open"
        )


class ClosesOnExit:
    """A ``with`` block that takes an open pool and closes it at its end."""

    def require_open(self) -> None:
        """Raises when the pool is closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the pool."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as close_error:
            if error is None:
                raise
            error.add_note(f"closing the pool failed as well: {close_error}")


class Held(Protocol):
    """A record of what executables may hold."""

    @property
    def id(self) -> int:
        """Its number in the pool."""

    @property
    def program(self) -> str:
        """The program that it was made for."""

    @property
    def holders(self) -> int:
        """How many executables hold it."""


T = TypeVar("T", bound=Held)


def still_held(candidates: Callable[[], Sequence[T]]) -> list[T]:
    """Returns the records that are held, once dropped executables had time to end.

    Args:
      candidates: reads the records that matter; it is called until none of them is held, for a
        fifth of a second at most.
    """
    held: list[T] = []
    for attempt in range(20):
        held = [record for record in candidates() if record.holders]
        if not held:
            break
        if attempt == 0:
            gc.collect()
        time.sleep(0.01)
    return held


def refusal(held: Sequence[Held], kind: str) -> str:
    """Says why a rollback has to wait, or nothing where nothing is held.

    Args:
      held: what executables hold.
      kind: what it is, such as ``"channel"``.
    """
    if not held:
        return ""
    programs = sorted({f"{record.program} ({kind} {record.id})" for record in held})
    return (
        f"{len(held)} {kind}(s) taken since the checkpoint are held by executables that are alive: "
        f"{', '.join(programs[:4])}{', ...' if programs[4:] else ''}; drop the compiled functions "
        "first (`del step`, or `step.clear_cache()`)"
    )
