"""What a pool's channels look like from outside: records, their table, checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

ChannelState = Literal["leased", "quarantined", "poisoned", "closed"]


@dataclasses.dataclass(frozen=True)
class ChannelRecord:
    """A channel, as it is now.

    Attributes:
      id: its number in the pool.
      op: the kind of call, or ``"open_order"`` for a channel that several calls share.
      program: the name of the compiled function that took it.
      site: the number of the call site in that program; they rise, and need not begin with 1.
      executable: numbers the executables of the pool in the order in which they were made.
      lane: the lane that it was traced in.
      capacity: the largest message, in bytes.
      bytes: what it takes on one rank, in bytes.
      ranks: the ranks of its group.
      holders: the call sites (of living executables) that hold it.
      state: ``leased``; ``quarantined`` (its executable is gone, its memory is not); ``poisoned``
        (a call timed out); ``closed`` (taken down).
      fault: why calls on it are refused, when they are.
    """

    id: int
    op: str
    program: str
    site: int
    executable: int
    lane: str
    capacity: int
    bytes: int
    ranks: int
    holders: int
    state: ChannelState
    fault: str

    @classmethod
    def of(cls, fields: dict[str, Any], ranks: int) -> ChannelRecord:
        """Returns the record of a channel as the extension reports it."""
        state: ChannelState
        if fields["poisoned"]:
            state = "poisoned"
        elif fields["refusal"]:
            state = "closed"
        else:
            state = "leased" if fields["holders"] else "quarantined"
        names = (
            "id",
            "op",
            "program",
            "site",
            "executable",
            "lane",
            "capacity",
            "bytes",
            "holders",
        )
        return cls(
            **{name: fields[name] for name in names},
            ranks=ranks,
            state=state,
            fault=fields["refusal"],
        )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A moment in a pool's life: what was leased before it survives a rollback to it.

    Attributes:
      pool: the pool's name.
      serial: the pool's number in this process; another pool of that name has another one.
      first_id: the number of the first channel that comes after it.
    """

    pool: str
    serial: int
    first_id: int


def print_table(title: str, records: list[ChannelRecord], console: Console) -> None:
    """Prints a table of channels."""
    table = Table(title=title, title_justify="left")
    table.add_column("channel", no_wrap=True)
    for heading in ("owner", "call site", "lane"):
        table.add_column(heading, overflow="fold")
    for heading in ("message", "bytes a rank", "ranks"):
        table.add_column(heading, justify="right", overflow="fold")
    # The word that one looks for is whole however narrow the terminal is.
    table.add_column("state", no_wrap=True, min_width=max(map(len, get_args(ChannelState))))
    for record in records:
        table.add_row(
            str(record.id),
            f"{record.program} #{record.executable}",
            f"{record.op} {record.site}",
            record.lane,
            f"{record.capacity:,}",
            f"{record.bytes:,}",
            str(record.ranks),
            record.state,
        )
    total = sum(record.bytes for record in records)
    table.caption = f"{len(records)} channels, {total:,} bytes a rank"
    console.print(table)
