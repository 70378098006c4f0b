"""What pools of channels and pools of workspaces share: they end, and are held until then."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def wait_for_dispatched(devices: Collection[jax.Device]) -> None:
    """Waits until the devices have run what was dispatched to them, whoever has its results.

    JAX runs programs asynchronously, and shows no more of them than the arrays that somebody has
    kept. What was dropped is waited for with programs that the runtime runs after it. A GPU runs
    programs in the order in which they were dispatched. CPU devices run programs of several devices
    one after another, and those of one device in the order in which a thread has dispatched them.
    This leaves out programs of one CPU device that another thread has dispatched and whose results
    nobody has; they wait for no other device.

    Args:
      devices: devices of this process, all of one platform.
    """
    wanted = set(devices)
    for array in jax.live_arrays():
        if not array.is_deleted() and not wanted.isdisjoint(array.sharding.device_set):
            # A failed computation has ended too; its error is its user's.
            with contextlib.suppress(Exception):
                array.block_until_ready()
    everywhere = sorted(wanted, key=lambda device: device.id)
    groups = [everywhere]
    if len(everywhere) > 1 and everywhere[0].platform == "cpu":
        groups += [[device] for device in everywhere]
    try:
        markers = _compile_markers(groups)
    except Exception as error:
        warnings.warn(
            f"programs whose results were dropped are not waited for: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    # Devices that run nothing any more have nothing in flight.
    with contextlib.suppress(Exception), jax.disable_jit(False):
        for marker in markers:
            marker().block_until_ready()


# Compiling waits for no other process, which may be gone.
_ALONE = {"xla_gpu_shard_autotuning": False}


def _marker() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _compile_markers(groups: Sequence[Sequence[jax.Device]]) -> list[Callable[[], jax.Array]]:
    """Compiles a program that does nothing, for all devices of each group together.

    It does so on a thread, which has nothing of the caller's mesh and trace. Whoever calls the
    programs dispatches them.
    """
    compiled: list[Callable[[], jax.Array]] = []
    failed: list[Exception] = []

    def compile_all() -> None:
        try:
            with jax.disable_jit(False):
                for group in groups:
                    sharding = NamedSharding(Mesh(np.array(group), ("all",)), PartitionSpec())
                    marker = jax.jit(_marker, out_shardings=sharding, compiler_options=_ALONE)
                    compiled.append(marker.lower().compile())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=compile_all)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts none while it exits
        compile_all()
    else:
        thread.join()
    if failed:
        raise failed[0]
    return compiled
