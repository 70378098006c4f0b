"""What channels take in memory, and which isolation mode fits: arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from jax_b12x.comm import checks

Isolation = Literal["call_site", "executable", "lane"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)

# Epochs, the poison word and the addresses of the peers; `ffi/runtime/pool.cc` has the same
# numbers.
HEADER_BYTES = 4096
PACKET_BYTES = 16
LINE_BYTES = 128
BUFFERS = 2
SMALLEST_LANE_BYTES = 4096
# The longest row that the fused norm keeps in registers; `oneshot_all_reduce.h` says it in packets.
MAX_ROW_BYTES = 8192 * PACKET_BYTES


def channel_bytes(message_bytes: int, world_size: int) -> int:
    """Returns the bytes that a channel takes on one rank.

    Each of the other ranks has a slab for each of two epochs in it.

    Args:
      message_bytes: the largest message that the channel carries, in bytes a rank.
      world_size: the ranks of a group.

    Raises:
      TypeError: an argument is no whole number.
      ValueError: there is less than one rank, or less than no byte.
    """
    message_bytes = checks.integer("message_bytes", message_bytes, 0, "bytes")
    world_size = checks.integer("world_size", world_size, 1, "ranks")
    return HEADER_BYTES + BUFFERS * (world_size - 1) * whole_lines(message_bytes)


def whole_lines(size: int) -> int:
    """Returns the bytes of the lines that hold ``size`` bytes: 128 cross a link at once."""
    return -(-size // LINE_BYTES) * LINE_BYTES


def lane_message_bytes(message_bytes: int) -> int:
    """Returns the size of the lane channel that serves ``message_bytes``: a power of two."""
    return max(SMALLEST_LANE_BYTES, 1 << max(0, message_bytes - 1).bit_length())


def required_bytes(programs: Iterable[Sequence[int]], world_size: int, isolation: Isolation) -> int:
    """Returns the bytes a rank that programs of one lane need.

    Args:
      programs: for each executable, the message bytes of its call sites.
      world_size: the ranks of a group.
      isolation: who shares a channel.

    Raises:
      TypeError: a size or ``world_size`` is no whole number.
      ValueError: there is no such isolation, or as for :func:`channel_bytes`.
    """
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation must be one of {', '.join(ISOLATIONS)}, not {isolation!r}")
    given: Any = programs
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(
            f"programs must be the message bytes of each executable's call sites, such as "
            f"[[4096, 512]], not {given!r}"
        )
    if isolation == "call_site":
        return sum(channel_bytes(size, world_size) for sites in programs for size in sites)
    largest = [max(sites) for sites in programs if sites]
    if isolation == "executable":
        return sum(channel_bytes(size, world_size) for size in largest)
    return sum(channel_bytes(size, world_size) for size in set(map(lane_message_bytes, largest)))
