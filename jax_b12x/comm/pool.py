"""The channel pool: the owner of the channels of one mesh axis."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, ClassVar, Literal, TypeVar

import jax
from jax.sharding import Mesh

from jax_b12x import _native, config, lanes
from jax_b12x.comm import checks, lifetime
from jax_b12x.comm import cutoff as cutoff_lib
from jax_b12x.comm import transport as transport_lib
from jax_b12x.comm.coordination import make_group
from jax_b12x.comm.lease import ChannelRecord, Checkpoint, print_table
from jax_b12x.comm.memory import ISOLATIONS, SMALLEST_LANE_BYTES, Isolation, channel_bytes
from jax_b12x.comm.teardown import TeardownRefusedError, teardown
from jax_b12x.comm.topology import Topology
from jax_b12x.comm.transport_ipc import IpcExchange
from jax_b12x.consoles import console

T = TypeVar("T")


class ChannelError(RuntimeError):
    """A channel or pool cannot do what was asked of it."""


class RollbackRefusedError(ChannelError):
    """An executable that holds a channel taken since the checkpoint is alive."""


class Pool(lifetime.ClosesOnExit):
    """The channels of one mesh axis, whatever they carry; users make a pool of a kind.

    Each compiled executable that communicates over the axis leases channels from the pool when it
    is made, and its leases end when it is dropped. A channel is never shared by two executables
    (unless ``isolation="lane"`` allows it), so that programs may run around each other freely. A
    pool is a context manager; leaving the context closes it.

    A compiled program knows its pool by name, so that it may be exported or come from the
    persistent compilation cache: open a pool of the same name before such a program is loaded.

    Args:
      mesh: the mesh that programs run on.
      axis: the axis, or axes, that collectives run over, 1 to 16 ranks. Other axes make groups side
        by side.
      name: what programs call it; by default made of the axis and its size. Names of open pools are
        unique in a process.
      cutoff: the largest message, in bytes that a rank sends to each other rank, that takes a
        channel; larger ones take XLA's collective. A number, a size such as ``"512KB"``, or
        ``"auto"``. By default ``B12X_ONESHOT_MAX_SIZE``.
      timeout: seconds that a rank waits for another before a call fails; by default
        ``B12X_ONESHOT_TIMEOUT_MS``.
      isolation: who shares a channel. ``"call_site"``: nobody. ``"executable"``: the call sites of
        one program, which must be inside :meth:`ordered`. ``"lane"``: the programs of one
        :func:`jax_b12x.lane`, which are inside :meth:`ordered` as well and which their owner runs
        in the same order on every rank, one after another. By default
        ``B12X_ONESHOT_SINGLE_CHANNEL``.
      max_bytes: the most bytes that channels may take on a rank, as a number or a size such as
        ``"256MB"``; ``None`` for no limit. It holds the smallest channel at least, which with
        ``isolation="lane"`` is one for messages of 4 KB. A message
        that no channel within it can carry is refused when it is traced, the channel that is one
        too many when its program is compiled.
      transport: ``"host"`` (CPU devices of one process), ``"peer"`` (GPUs of one process),
        ``"ipc"`` (one process a GPU) or ``"xla"`` (XLA's collectives); ``None`` takes the one that
        fits, and ``"xla"`` with a warning where none does.

    Raises:
      TypeError: an argument is not of its kind.
      ValueError: an argument has a value that it may not have.
      TransportError: the transport that was asked for cannot be used.
    """

    # What its names begin with.
    _prefix: ClassVar[str] = ""

    def __init__(
        self,
        mesh: Mesh,
        axis: str | tuple[str, ...],
        *,
        name: str | None = None,
        cutoff: int | str | None = None,
        timeout: float | None = None,
        isolation: Isolation | None = None,
        max_bytes: int | str | None = None,
        transport: transport_lib.TransportName | None = None,
    ):
        self.topology = Topology.of(mesh, axis)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a text that is not empty, or None, not {name!r}")
        self._chosen_by = ""
        if isolation is None:
            isolation = "lane" if config.ONESHOT_SINGLE_CHANNEL.get() else "call_site"
            if isolation == "lane":
                self._chosen_by = f" (by {config.ONESHOT_SINGLE_CHANNEL.name}=1)"
        if isolation not in ISOLATIONS:
            raise ValueError(f"isolation must be one of {', '.join(ISOLATIONS)}, not {isolation!r}")
        if timeout is None:
            timeout = config.ONESHOT_TIMEOUT_MS.get() / 1000
        timeout = checks.number("timeout", timeout)
        if not 0.001 <= timeout <= 3600:
            raise ValueError(f"timeout must be between 0.001 and 3600 seconds, not {timeout!r}")
        if max_bytes is not None:
            max_bytes = checks.size("max_bytes", max_bytes, least=1)
            message = SMALLEST_LANE_BYTES if isolation == "lane" else 1
            smallest = channel_bytes(message, self.topology.world_size)
            if max_bytes < smallest:
                raise ValueError(
                    f"max_bytes must be at least {smallest}, which the smallest channel of "
                    f"{self.topology.world_size} ranks takes with isolation={isolation!r}, or None "
                    f"for no limit, not {max_bytes!r}"
                )
        self.isolation: Isolation = isolation
        self.timeout = timeout
        self.max_bytes = max_bytes
        _native.ensure_registered()
        chosen = transport_lib.choose(self.topology, transport)
        self.transport = chosen.name
        self.cutoff = cutoff_lib.resolve(cutoff, self.topology)
        if chosen.reason:
            warnings.warn(
                f"{type(self).__name__} over {axis!r} uses XLA's collectives: {chosen.reason}",
                stacklevel=2,
            )
        if self.transport == "host":
            _warn_of_few_threads(self.topology)
        axes = self.topology.axes
        self._lock = threading.Lock()
        self._serial = lifetime.new_serial()
        self._told: set[int] = set()  # channels whose fault check() has reported
        self._state: Literal["open", "closed"] = "open"
        self._group = make_group(self.topology)
        self._native: Any = None
        self._exchange: IpcExchange | None = None
        self.name = name or f"{self._prefix}{'_'.join(axes)}{self.topology.world_size}"
        if self.transport != "xla":
            self._native = self._open(chosen, unique=name is None)

    def _open(self, chosen: transport_lib.Transport, unique: bool) -> Any:
        """Opens the native pool; where the name is ours, the first one that is free."""
        extension = chosen.extension()
        base = self.name
        for number in range(1, 1000):
            self.name = base if number == 1 else f"{base}_{number}"
            if chosen.name == "ipc":
                self._exchange = IpcExchange(
                    self.name, self.topology, self.timeout, by_lane=self.isolation == "lane"
                )
            try:
                return extension.open_pool(
                    name=self.name,
                    axis=",".join(self.topology.axes),
                    layout=self.topology.layout,
                    isolation=self.isolation,
                    world_size=self.topology.world_size,
                    num_groups=self.topology.num_groups,
                    places=[(p.ordinal, p.group, p.rank) for p in self.topology.places if p.local],
                    timeout_ms=max(1, round(self.timeout * 1000)),
                    max_bytes=self.max_bytes or 0,
                    publish=None if self._exchange is None else self._exchange.publish,
                    connect=None if self._exchange is None else self._exchange.connect,
                )
            except extension.ChannelError as error:
                if not unique:
                    raise ValueError(f"name={base!r}: {error}") from None
        raise ChannelError(f"too many pools named {base!r} are open")

    @property
    def world_size(self) -> int:
        """The ranks of a group."""
        return self.topology.world_size

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._state == "closed"

    @property
    def isolation_text(self) -> str:
        """The isolation, and what chose it where the maker of the pool did not: for messages."""
        return f"isolation={self.isolation!r}{self._chosen_by}"

    @property
    def shares_channels(self) -> bool:
        """Whether call sites share channels, so that programs must be :meth:`ordered`."""
        return self.transport != "xla" and self.isolation != "call_site"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, axis={self.topology.axes}, "
            f"ranks={self.world_size}, transport={self.transport!r}, "
            f"isolation={self.isolation!r}, cutoff={self.cutoff}, {self._state})"
        )

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        """Gives the calls that are traced inside one order and, with shared channels, one channel.

        Put it around the body of ``shard_map``, as a context or as a decorator
        (``jax.shard_map(pool.ordered()(body), ...)``). With ``isolation="call_site"`` it changes
        nothing. The order holds through ``scan``, ``cond``, ``while_loop``, inner ``jit`` and
        command buffers: each call takes an array from the call before it. It has to be under
        ``jax.jit``. The limits of JAX's mutable arrays are its own: ``vmap`` goes around it and not
        inside, and gradients may stop at control flow or ``jax.checkpoint`` inside it. Train with
        ``isolation="call_site"``.

        Raises:
          ChannelError: the pool is closed.
          ValueError: with shared channels, it is not inside ``shard_map`` over the pool's mesh, or
            not under ``jax.jit``.
        """
        if not self.shares_channels:
            yield
            return
        # The op imports this module's class for its types.
        from jax_b12x.comm import call, order, primitives

        call.check_axes("pool.ordered()", self)
        largest = order.Largest()
        token = primitives.open_order(self, lanes.current(), largest)
        with order.ordered(self, token, largest):
            yield

    def require_open(self) -> None:
        """Raises when the pool is closed.

        Raises:
          ChannelError: it is.
        """
        if self.closed:
            raise ChannelError(
                f"pool {self.name!r} is closed; make a new one and trace with it again"
            )

    def records(self) -> list[ChannelRecord]:
        """Returns a record of every channel there is."""
        if self._native is None:
            return []
        return [ChannelRecord.of(fields, self.world_size) for fields in self._native.records()]

    @property
    def bytes(self) -> int:
        """The bytes that channels take on one rank.

        On CPU devices ranks read each other's buffers in place; the number is what the same
        programs take on GPUs, and ``max_bytes`` limits it just so.
        """
        return 0 if self._native is None else int(self._native.bytes())

    def describe(self, file: IO[str] | None = None) -> None:
        """Prints a table of the channels: owner, call site, lane, bytes, ranks, state."""
        print_table(repr(self), self.records(), console(file))

    def check(self) -> None:
        """Raises if a call on one of the pool's channels timed out and it has not said so yet.

        On GPUs a call that times out yields NaN and the error appears here, once, and whenever a
        program that holds the channel is run again; on CPU devices it appears on the result as
        well. :meth:`describe` shows which channels are poisoned.

        Raises:
          ChannelError: it names the pool, the channel, the rank that did not arrive, the timeout.
        """
        poisoned = {
            record.id: record.fault for record in self.records() if record.state == "poisoned"
        }
        with self._lock:
            news = sorted(poisoned.keys() - self._told)
            self._told.update(news)
        if news:
            raise ChannelError("; ".join(poisoned[channel] for channel in news))

    def block_until_ready(self, tree: T) -> T:
        """Waits for arrays like :func:`jax.block_until_ready`, then does :meth:`check`."""
        tree = jax.block_until_ready(tree)
        self.check()
        return tree

    def checkpoint(self) -> Checkpoint:
        """Returns the present moment, to :meth:`rollback` to."""
        self.require_open()
        first_id = 0 if self._native is None else int(self._native.next_id())
        return Checkpoint(self.name, self._serial, first_id)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Destroys the channels that were leased since ``checkpoint``; earlier ones are untouched.

        All processes of the mesh call it together.

        Raises:
          ValueError: the checkpoint is of another pool.
          RollbackRefusedError: an executable that holds one of them is alive, on this process or on
            another; nothing was changed.
          TeardownError: a step failed; all others were done.
        """
        self.require_open()
        lifetime.check_checkpoint(checkpoint, Checkpoint, self.name, self._serial)
        if self._native is None:
            return

        def refusal() -> str:
            first = checkpoint.first_id
            held = lifetime.still_held(lambda: [r for r in self.records() if r.id >= first])
            return lifetime.refusal(held, "channel")

        try:
            self._take_down("rollback", checkpoint.first_id, forever=False, refusal=refusal)
        except TeardownRefusedError as error:
            raise RollbackRefusedError(str(error)) from None

    def close(self) -> None:
        """Destroys all channels; programs that hold one give a clear error from now on.

        It waits for what was dispatched before. All processes of the mesh call it together, when no
        program that uses the pool is being dispatched by another thread. A second call does
        nothing.

        Raises:
          TeardownError: a step failed; all others were done, and the pool is closed.
        """
        with self._lock:
            if self.closed:
                return
            self._state = "closed"
        if self._native is None:
            return
        try:
            self._take_down("close", 0, forever=True, refusal=lambda: "")
        finally:
            self._native.unregister()

    def _take_down(
        self, why: str, first_id: int, *, forever: bool, refusal: Callable[[], str]
    ) -> None:
        lifetime.wait_for_dispatched([p.device for p in self.topology.places if p.local])
        native = self._native
        ids = [record.id for record in self.records() if record.id >= first_id]
        ranks = sorted({place.rank for place in self.topology.places if place.local})
        reason = (
            f"pool {self.name!r} was closed" if forever else f"pool {self.name!r} was rolled back"
        )
        try:
            teardown(
                f"{why} of pool {self.name!r}",
                [_ChannelOfRank(self, channel, rank) for channel in ids for rank in ranks],
                self._group(f"{self.name}/{why}"),
                refusal=refusal,
                commit=lambda: native.retire(
                    first=first_id, reason=reason, forever=forever, require_idle=not forever
                ),
            )
        except TeardownRefusedError:
            raise
        except BaseException:
            _forget(native, ids)
            raise
        else:
            _forget(native, ids)


class ChannelPool(Pool):
    """The channels of the all-reduces over one mesh axis.

    ::

        with comm.ChannelPool(mesh, "tp") as pool:
            step = jax.jit(jax.shard_map(
                lambda x, w: comm.all_reduce(x @ w, pool), mesh=mesh,
                in_specs=(P(None, "tp"), P("tp")), out_specs=P()))

    What a pool is, and what it takes, says :class:`Pool`.
    """


class DcpPool(Pool):
    """The channels of the exchanges of decode context parallelism over one mesh axis.

    ::

        with comm.DcpPool(mesh, "dcp") as pool:
            step = jax.jit(jax.shard_map(
                lambda out, lse: comm.dcp_combine(out, lse, pool), mesh=mesh,
                in_specs=(P("dcp"), P("dcp")), out_specs=P(None, "dcp")))

    What a pool is, and what it takes, says :class:`Pool`.
    """

    _prefix = "dcp_"


def _warn_of_few_threads(topology: Topology) -> None:
    """Warns where XLA's CPU client may wait for itself, with collectives of any kind."""
    devices = sum(place.local for place in topology.places)
    threads = config.cpu_client_threads()
    if devices > 1 and threads < 2 * devices:
        warnings.warn(
            f"XLA's CPU client has {threads} threads for {devices} devices: programs that are "
            "dispatched one after another without a wait can hold all of them, and a collective "
            f"then times out. Set NPROC={max(64, 2 * devices)} in the environment before JAX "
            "starts",
            stacklevel=3,
        )


def _forget(native: Any, ids: list[int]) -> None:
    for channel in ids:
        native.forget(channel)


class _ChannelOfRank:
    """A channel's memory on one rank of this process, as the teardown takes it."""

    def __init__(self, pool: Pool, channel: int, rank: int):
        self._native = pool._native
        self._exchange = pool._exchange
        self._at = (channel, rank)
        self.name = f"pool {pool.name!r}, channel {channel}, rank {rank}"

    def quiesce(self) -> None:
        self._native.quiesce(*self._at)

    def close_imports(self) -> None:
        if self._exchange is not None:
            self._exchange.close(*self._at)
        self._native.close_imports(*self._at)

    def free_exports(self) -> None:
        self._native.free_exports(*self._at)
