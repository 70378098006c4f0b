"""How much memory serving takes, from a run of executables that are thrown away afterwards.

A server that sizes its KV cache has to know what its programs need before it makes those that stay.
Profiling programs take channels and workspaces like any others; a checkpoint and a rollback around
them leave nothing behind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from examples.flax_moe import decode
from examples.flax_moe.attention import KVCache
from examples.flax_moe.decode import Generator, Sequence
from jax_b12x import lane, workspace


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """What one executable needs on each device, in bytes.

    Attributes:
      name: which one.
      lane: the lane that it was made in.
      arguments: what it is given: parameters, cache.
      results: what it returns, besides what it updates in place.
      temporary: what it needs while it runs.
      channels: what its channels take.
      live: all arrays of the process on one device after a run, its results included.
    """

    name: str
    lane: str
    arguments: int
    results: int
    temporary: int
    channels: int
    live: int


def profile(generator: Generator) -> list[ProgramMemory]:
    """Compiles, runs and measures every executable of a generator, and drops it again.

    Args:
      generator: what it has compiled for itself stays as it is.

    Returns:
      A record for each executable, in the order in which a generation runs them.
    """
    return [_measure_and_forget(generator, name, program) for name, program in _programs(generator)]


def _measure_and_forget(generator: Generator, name: str, program: _Program) -> ProgramMemory:
    workspaces, pool = workspace.default(), generator.pool
    memory = workspaces.checkpoint()
    channels = None if pool is None else pool.checkpoint()
    measured = _measure(generator, name, *program)
    workspaces.rollback(memory)
    if pool is not None and channels is not None:
        pool.rollback(channels)
    return measured


# Its lane, its function, what it is given after the model, and which of these it uses up.
_Program: TypeAlias = tuple[str, Any, tuple[Any, ...], tuple[int, ...]]


def _programs(generator: Generator) -> Iterator[tuple[str, _Program]]:
    """Yields each executable by name."""
    config, width = generator.config, 1 + generator.config.drafts
    cache = generator.place(KVCache.zeros(config))
    tokens, (count, position) = np.zeros(width, np.int32), np.int32([width, 0])
    yield "read", ("target", decode._read, (tokens, count, position, cache), (3,))
    hidden, token, position = generator.place(
        (jnp.zeros(config.hidden), jnp.int32(0), jnp.int32(width))
    )
    degrees, key = np.float32(0), jax.random.key(0)
    yield "draft", ("draft", decode._draft, (hidden, token, degrees, key), ())
    cache = generator.place(KVCache.zeros(config))  # the first one was used up
    sequence = Sequence(cache, position, token, hidden)
    arguments = (sequence, *generator.no_drafts(), np.int32(0), degrees, key)
    yield "verify", ("target", decode._verify, arguments, (0,))


def _measure(
    generator: Generator,
    name: str,
    in_lane: str,
    function: Any,
    arguments: tuple[Any, ...],
    used_up: tuple[int, ...],
) -> ProgramMemory:
    channel_bytes = 0 if generator.pool is None else generator.pool.bytes

    def disposable(state: Any, *arguments: Any) -> Any:
        return function.__wrapped__(generator.graph, state, *arguments)

    program = jax.jit(disposable, donate_argnums=tuple(index + 1 for index in used_up))
    with lane(in_lane):
        compiled = program.lower(generator.state, *arguments).compile()
    analysis = compiled.memory_analysis()
    results = jax.block_until_ready(compiled(generator.state, *arguments))
    live = _live_bytes(jax.tree.leaves(results)[0])
    program.clear_cache()
    taken = 0 if generator.pool is None else generator.pool.bytes - channel_bytes
    return ProgramMemory(
        name=name,
        lane=in_lane,
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        channels=taken,
        live=live,
    )


def _live_bytes(like: jax.Array) -> int:
    """Returns the bytes of all arrays on the first of the devices that ``like`` is on."""
    device = min(like.sharding.device_set, key=lambda device: device.id)
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.live_arrays()
        if not array.is_deleted() and device in array.sharding.device_set
    )


def table(measured: list[ProgramMemory]) -> Table:
    """Returns the records as a table for people."""
    result = Table(
        title="KB on each device, measured with executables that were thrown away",
        title_justify="left",
    )
    result.add_column("executable")
    result.add_column("lane")
    names = ("arguments", "results", "temporary", "channels", "live")
    for name in names:
        result.add_column(name, justify="right")
    for one in measured:
        sizes = (f"{getattr(one, name) / 1000:,.0f}" for name in names)
        result.add_row(one.name, one.lane, *sizes)
    return result
