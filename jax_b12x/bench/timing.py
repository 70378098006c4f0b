"""Timing from the host: medians of calls that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jax_b12x.bench.measurement import Measurement, Value

# A sample lasts at least this long, so that the clock and the dispatch of a call do not show.
_SAMPLE_SECONDS = 1e-3
# Of a captured chain, whose replays overlap their dispatch.
_CHAIN_SAMPLE_SECONDS = 20e-3


def take_turns(
    calls: Mapping[str, Callable[[], Any]],
    case: Mapping[str, Value],
    *,
    seconds: float = 1.0,
    min_samples: int = 7,
) -> list[Measurement]:
    """Times calls side by side: each round times every call once, so that drift meets all alike.

    Args:
      calls: functions that return arrays, by name; each is called once first, to compile.
      case: what they run on, for the record.
      seconds: how long to sample each of them.
      min_samples: the fewest rounds, however long they take.

    Returns:
      A measurement for each call, in order.
    """
    repeats: dict[str, int] = {}
    rounds = 1
    for name, call in calls.items():
        _time(call, 1)
        once = _time(call, 1)
        repeats[name] = max(1, round(_SAMPLE_SECONDS / max(once, 1e-9)))
        rounds = max(rounds, round(seconds / max(once * repeats[name], 1e-9)))
    rounds = min(max(rounds, min_samples), 1000)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds * len(calls)
    for index in range(rounds):
        if index >= min_samples and time.perf_counter() > stop:
            break
        for name, call in calls.items():
            samples[name].append(_time(call, repeats[name]))
    return [from_samples(name, case, times) for name, times in samples.items()]


def chains(
    calls: Mapping[str, Callable[[], Any]],
    case: Mapping[str, Value],
    steps: int | Mapping[str, int],
    samples: int,
) -> list[Measurement]:
    """Times programs of many steps side by side; the times are of one step.

    Each is called three times first: it is compiled and run eagerly, captured, replayed.

    Args:
      calls: functions that run a program, by name.
      case: what they run on, for the record.
      steps: the steps of each program, of all or by name.
      samples: how many samples of each to take.
    """
    repeats = {}
    for name, call in calls.items():
        for _ in range(3):
            jax.block_until_ready(call())
        repeats[name] = max(1, round(_CHAIN_SAMPLE_SECONDS / _replays(call, 10)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            each = steps if isinstance(steps, int) else steps[name]
            taken[name].append(_replays(call, repeats[name]) / each)
    return [from_samples(name, case, times) for name, times in taken.items()]


def from_samples(what: str, case: Mapping[str, Value], samples: list[float]) -> Measurement:
    """Returns the measurement that summarises the times of single calls, in seconds."""
    low, median, high = np.percentile(np.asarray(samples), [10, 50, 90])
    return Measurement(what, dict(case), float(median), float(low), float(high), len(samples))


def _time(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = call()
    for leaf in jax.tree.leaves(result):
        leaf.block_until_ready()
    return (time.perf_counter() - start) / repeats


def _replays(call: Callable[[], Any], repeats: int) -> float:
    begun = time.perf_counter()
    for _ in range(repeats):
        # Let go of the results first, so that the next ones have the same addresses: XLA captures a
        # program again whenever an address has changed.
        result = None
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / repeats
