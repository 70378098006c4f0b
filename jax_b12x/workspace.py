"""Workspaces: what a call site keeps on a device between executions, and the pools that own them.

A resident grid meets at a barrier whose words live from run to run; work beside the routed experts
needs a stream and two events. Each call site of a compiled executable leases these from a pool when
the executable is made, and its lease ends when the executable is dropped, so that a target model
and a draft model never meet in one of them.

Code that does nothing about it uses the pool named ``default``. To have limits, lanes and
checkpoints, open one::

    with WorkspacePool(lanes=("target", "draft")) as pool, pool.use():
        with jax_b12x.lane("target"):
            target = jax.jit(...).lower(...).compile()
        ...
        pool.lock()        # from now on whatever would need more memory is an error
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import IO, Any, Literal, Self, TypeVar, get_args

import jax
from rich.table import Table

from jax_b12x import _native, lanes
from jax_b12x.comm import checks, lifetime
from jax_b12x.comm.teardown import LocalGroup, TeardownRefusedError, teardown
from jax_b12x.consoles import console

T = TypeVar("T")

WorkspaceIsolation = Literal["call_site", "lane"]
WorkspaceState = Literal["leased", "idle", "closed"]

DEFAULT = "default"


class WorkspaceError(RuntimeError):
    """A workspace pool cannot do what was asked of it, or a run on a workspace failed."""


class WorkspaceRollbackError(WorkspaceError):
    """An executable that holds a workspace taken since the checkpoint is alive."""


@dataclasses.dataclass(frozen=True)
class WorkspaceRecord:
    """A workspace, as it is now.

    Attributes:
      id: its number in the pool, on its platform.
      platform: ``"cpu"`` or ``"cuda"``.
      op: the kind of call that took it.
      program: the name of the compiled function that took it.
      site: the number of the call site in that program.
      executable: numbers the executables of the pool in the order in which they were made.
      lane: the lane that it was traced in.
      bytes: what it takes on a device, in bytes. On CPU devices nothing is kept; the number is what
        the same program takes on a GPU.
      streams: streams of its own on each device.
      devices: the ordinals of the devices where it has run.
      holders: the call sites of living executables that hold it.
      state: ``leased``; ``idle`` (its executable is gone, the next call site of its lane and size
        takes it over); ``closed`` (taken down).
      faults: runs on it that failed, so far.
    """

    id: int
    platform: Literal["cpu", "cuda"]
    op: str
    program: str
    site: int
    executable: int
    lane: str
    bytes: int
    streams: int
    devices: tuple[int, ...]
    holders: int
    state: WorkspaceState
    faults: int


@dataclasses.dataclass(frozen=True)
class WorkspaceCheckpoint:
    """A moment in a pool's life: what was leased before it survives a rollback to it.

    Attributes:
      pool: the pool's name.
      serial: the pool's number in this process; another pool of that name has another one.
      first_ids: the number of the first workspace after it, by platform.
    """

    pool: str
    serial: int
    first_ids: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a call that is being traced belongs.

    Attributes:
      pool: the name of its workspace pool.
      lane: its lane.
    """

    pool: str
    lane: str


class WorkspacePool(lifetime.ClosesOnExit):
    """The owner of workspaces; a context manager that closes it.

    A compiled program knows its pool by name, so that it may be exported or come from the
    persistent compilation cache: open a pool of the same name before such a program is loaded.

    Args:
      name: what programs call it; by default ``workspaces``, then ``workspaces_2``. Names of open
        pools are unique in a process.
      isolation: who shares a workspace. ``"call_site"``: nobody. ``"lane"``: programs of one
        :func:`jax_b12x.lane` that have different names, which their owner runs one after another;
        two call sites of one program never do.
      lanes: the lanes there are; ``None`` for any. Code outside of all lanes is in the lane
        ``"default"``, which has to be named like others.
      max_bytes: the most bytes that workspaces may take on a device, as a number or a size such as
        ``"1MB"``; ``None`` for no limit.
      timeout: seconds that a block of a resident grid waits for the others before the run fails.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: an argument has a value that it may not have.
    """

    def __init__(
        self,
        *,
        name: str | None = None,
        isolation: WorkspaceIsolation = "call_site",
        lanes: Sequence[str] | None = None,
        max_bytes: int | str | None = None,
        timeout: float = 10.0,
    ):
        if isolation not in get_args(WorkspaceIsolation):
            raise ValueError(f"isolation must be 'call_site' or 'lane', not {isolation!r}")
        if lanes is not None:
            if isinstance(lanes, str) or not isinstance(lanes, Sequence) or not lanes:
                raise ValueError(f"lanes must be names such as ('target', 'draft'), not {lanes!r}")
            for lane in lanes:
                check_lane(lane)
            if len(set(lanes)) < len(lanes):
                raise ValueError(f"lanes must be different names, not {lanes!r}")
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a text that is not empty, or None, not {name!r}")
        if max_bytes is not None:
            max_bytes = checks.size("max_bytes", max_bytes, least=1)
        timeout = checks.number("timeout", timeout)
        if not 0.001 <= timeout <= 3600:
            raise ValueError(f"timeout must be between 0.001 and 3600 seconds, not {timeout!r}")
        self.isolation: WorkspaceIsolation = isolation
        self.lanes = None if lanes is None else tuple(lanes)
        self.max_bytes = max_bytes
        self.timeout = timeout
        self._serial = lifetime.new_serial()
        self._natives = self._open(name)
        self._closed = False

    def _open(self, asked: str | None) -> dict[Literal["cpu", "cuda"], Any]:
        """Opens the native pools; where the name is ours, the first one that is free."""
        base = asked or "workspaces"
        for number in range(1, 1000):
            self.name = base if number == 1 else f"{base}_{number}"
            opened: dict[Literal["cpu", "cuda"], Any] = {}
            try:
                for platform, extension in _extensions().items():
                    opened[platform] = extension.open_workspace_pool(
                        name=self.name,
                        isolation=self.isolation,
                        lanes=list(self.lanes or ()),
                        max_bytes=self.max_bytes or 0,
                        timeout_ms=max(1, round(self.timeout * 1000)),
                    )
                return opened
            except _errors() as error:
                for native in opened.values():
                    native.unregister()
                if asked is not None:
                    raise ValueError(f"name={asked!r}: {error}") from None
        raise WorkspaceError(f"too many workspace pools named {base!r} are open")

    @classmethod
    def _default(cls) -> WorkspacePool:
        pool = cls.__new__(cls)
        pool.name = DEFAULT
        pool.isolation = "call_site"
        pool.lanes = None
        pool.max_bytes = None
        pool.timeout = 10.0
        pool._serial = lifetime.new_serial()
        pool._natives = {
            platform: extension.find_workspace_pool(DEFAULT)
            for platform, extension in _extensions().items()
        }
        pool._closed = False
        return pool

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def locked(self) -> bool:
        """Whether growth is refused."""
        return any(native.locked() for native in self._natives.values())

    def __repr__(self) -> str:
        state = "closed" if self._closed else "locked" if self.locked else "open"
        return (
            f"WorkspacePool({self.name!r}, isolation={self.isolation!r}, lanes={self.lanes}, "
            f"max_bytes={self.max_bytes}, {state})"
        )

    @contextlib.contextmanager
    def use(self) -> Iterator[Self]:
        """Makes what is traced inside lease its workspaces from this pool."""
        self.require_open()
        with _pool(self):
            yield self

    def require_open(self) -> None:
        """Raises when the pool is closed.

        Raises:
          WorkspaceError: it is.
        """
        if self._closed:
            raise WorkspaceError(f"workspace pool {self.name!r} is closed")

    def check_lane(self, lane: str) -> None:
        """Refuses a lane that the pool was not configured for.

        Raises:
          ValueError: names the lanes there are.
        """
        if self.lanes is not None and lane not in self.lanes:
            raise ValueError(
                f"the lane is {lane!r}, and workspace pool {self.name!r} has the lanes "
                f"{', '.join(map(repr, self.lanes))}: trace it inside `with jax_b12x.lane(...):` "
                "with one of these"
            )

    def lock(self) -> None:
        """Refuses growth from now on: call it once everything has been compiled and run.

        A program that needs more memory, or runs on another device than before, fails with an error
        that names the call site and the bytes. What dropped executables left may be taken over.
        """
        self.require_open()
        for native in self._natives.values():
            native.lock(True)

    def unlock(self) -> None:
        """Allows growth again."""
        self.require_open()
        for native in self._natives.values():
            native.lock(False)

    @property
    def bytes(self) -> int:
        """The bytes that workspaces take on one device."""
        return max(int(native.bytes()) for native in self._natives.values())

    def records(self) -> list[WorkspaceRecord]:
        """Returns a record of every workspace there is."""
        return [
            _record(platform, fields)
            for platform, native in self._natives.items()
            for fields in native.records()
        ]

    def describe(self, file: IO[str] | None = None) -> None:
        """Prints a table of the workspaces: owner, call site, lane, bytes, devices, state."""
        table = Table(title=repr(self), title_justify="left")
        for heading in ("workspace", "executable", "call site", "lane"):
            table.add_column(heading, overflow="fold")
        for heading in ("bytes", "streams"):
            table.add_column(heading, justify="right", overflow="fold")
        table.add_column("devices", overflow="fold")
        table.add_column("state", overflow="fold", min_width=len("leased,"))
        records = self.records()
        for record in records:
            devices = ", ".join(f"{record.platform}:{device}" for device in record.devices)
            faults = f", {record.faults} failed" if record.faults else ""
            table.add_row(
                str(record.id),
                f"{record.program} #{record.executable}",
                f"{record.op} {record.site}",
                record.lane,
                f"{record.bytes:,}",
                str(record.streams),
                devices or "none yet",
                record.state + faults,
            )
        table.caption = f"{len(records)} workspaces, {self.bytes:,} bytes a device"
        console(file).print(table)

    def check(self) -> None:
        """Raises if a run on one of the pool's workspaces failed and nobody was told yet.

        On GPUs such a run yields NaN, and the error appears here or when the program is run next,
        whichever comes first; after it the workspace is as new.

        Raises:
          WorkspaceError: it names the pool, the call site, the device and the timeout.
        """
        faults = [fault for native in self._natives.values() for fault in native.take_faults()]
        if faults:
            raise WorkspaceError("; ".join(faults))

    def block_until_ready(self, tree: T) -> T:
        """Waits for arrays like :func:`jax.block_until_ready`, then does :meth:`check`."""
        tree = jax.block_until_ready(tree)
        self.check()
        return tree

    def checkpoint(self) -> WorkspaceCheckpoint:
        """Returns the present moment, to :meth:`rollback` to."""
        self.require_open()
        return WorkspaceCheckpoint(
            self.name,
            self._serial,
            tuple((platform, int(native.next_id())) for platform, native in self._natives.items()),
        )

    def rollback(self, checkpoint: WorkspaceCheckpoint) -> None:
        """Frees the workspaces that were leased since ``checkpoint``; earlier ones are untouched.

        Raises:
          ValueError: the checkpoint is of another pool.
          WorkspaceRollbackError: an executable that holds one of them is alive; nothing was
            changed.
          TeardownError: a step failed; all others were done.
        """
        self.require_open()
        lifetime.check_checkpoint(checkpoint, WorkspaceCheckpoint, self.name, self._serial)
        first_ids = dict(checkpoint.first_ids)

        def refusal() -> str:
            held = lifetime.still_held(
                lambda: [r for r in self.records() if r.id >= first_ids[r.platform]]
            )
            return lifetime.refusal(held, "workspace")

        try:
            self._take_down("rollback", first_ids, forever=False, refusal=refusal)
        except TeardownRefusedError as error:
            raise WorkspaceRollbackError(str(error)) from None

    def close(self) -> None:
        """Frees all workspaces; programs that hold one give a clear error from now on.

        It waits for what was dispatched before. A second call does nothing. The pool ``default``
        cannot be closed.

        Raises:
          TeardownError: a step failed; all others were done, and the pool is closed.
        """
        if self.name == DEFAULT:
            raise WorkspaceError("the workspace pool 'default' stays open as long as the process")
        if self._closed:
            return
        self._closed = True
        try:
            self._take_down(
                "close",
                dict.fromkeys(self._natives, 0),
                forever=True,
                refusal=lambda: "",
            )
        finally:
            for native in self._natives.values():
                native.unregister()

    def _take_down(
        self, why: str, first_ids: dict[str, int], *, forever: bool, refusal: Any
    ) -> None:
        # Every program that was dispatched has its memory until it ends.
        for platform in sorted({record.platform for record in self.records()}):
            lifetime.wait_for_dispatched(jax.local_devices(backend=platform))
        reason = (
            f"workspace pool {self.name!r} was {'closed' if forever else 'rolled back'}: compile "
            "the program again"
        )

        def commit() -> None:
            for platform, native in self._natives.items():
                native.retire(
                    first=first_ids[platform],
                    reason=reason,
                    forever=forever,
                    require_idle=not forever,
                )

        taken = [record for record in self.records() if record.id >= first_ids[record.platform]]
        teardown(
            f"{why} of workspace pool {self.name!r}",
            [_Taken(self, record) for record in taken],
            LocalGroup(),
            refusal=refusal,
            commit=commit,
        )


class _Taken:
    """A workspace, as the teardown takes it: no other process knows of it."""

    def __init__(self, pool: WorkspacePool, record: WorkspaceRecord):
        self._native = pool._natives[record.platform]
        self._id = record.id
        self.name = f"workspace pool {pool.name!r}, workspace {record.id} on {record.platform}"

    def quiesce(self) -> None:
        self._native.quiesce(self._id)

    def close_imports(self) -> None:
        """Nothing was imported."""

    def free_exports(self) -> None:
        self._native.free(self._id)


# JAX traces anew where the pool differs.
_pool = jax.make_user_context(None)


@functools.cache
def default() -> WorkspacePool:
    """Returns the pool that code uses which does nothing about workspaces."""
    return WorkspacePool._default()


def current() -> Place:
    """Returns the pool and lane in force, for a call that is being traced.

    Raises:
      ValueError: the pool does not have the lane; names those it has.
      WorkspaceError: the pool is closed.
    """
    pool: WorkspacePool | None = _pool.value
    lane = lanes.current()
    if pool is None:
        return Place(DEFAULT, lane)
    pool.require_open()
    pool.check_lane(lane)
    return Place(pool.name, lane)


def check_lane(name: Any) -> None:
    """Refuses what is not the name of a lane.

    Raises:
      ValueError: it is not.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"lanes must be names such as 'target' or 'draft', not {name!r}")


def _extensions() -> dict[Literal["cpu", "cuda"], Any]:
    extensions: dict[Literal["cpu", "cuda"], Any] = {"cpu": _native.host()}
    cuda = _native.cuda()
    if cuda is not None:
        extensions["cuda"] = cuda
    return extensions


def _errors() -> tuple[type[Exception], ...]:
    return tuple(extension.WorkspaceError for extension in _extensions().values())


def _record(platform: Literal["cpu", "cuda"], fields: dict[str, Any]) -> WorkspaceRecord:
    state: WorkspaceState = "leased" if fields["holders"] else "idle"
    if fields["refusal"]:
        state = "closed"
    names = ("id", "op", "program", "site", "executable", "lane", "bytes", "holders", "faults")
    return WorkspaceRecord(
        **{name: fields[name] for name in names},
        platform=platform,
        streams=int(fields["aux_stream"]),
        devices=tuple(fields["devices"]),
        state=state,
    )
