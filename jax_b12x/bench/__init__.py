"""Benchmarks, run by ``python -m jax_b12x bench NAME``: one module each.

A benchmark module offers what :class:`Benchmark` says and is listed in :data:`BENCHMARKS`. It
returns a :class:`~jax_b12x.bench.measurement.Report`; the command line prints its table and writes
JSON and a plot of it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Protocol, cast

from rich.console import RenderableType

from jax_b12x.bench.measurement import Report

# Called with a few words whenever a benchmark turns to something else.
Progress = Callable[[str], None]


class Benchmark(Protocol):
    """What a benchmark module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the benchmark's own options; ``--json`` and ``--plot`` are there already."""

    def run(self, args: argparse.Namespace, progress: Progress) -> Report:
        """Measures.

        Raises:
          ValueError: an option has a value that it may not have; shown as a usage error.
        """

    def table(self, report: Report) -> RenderableType:
        """Returns the report as a table for people."""

    def plot(self, report: Report, path: str) -> None:
        """Draws the report into a picture file."""


# Name on the command line: the module, imported only when it is called for, and a line of help.
BENCHMARKS: dict[str, tuple[str, str]] = {
    "comm": ("jax_b12x.bench.comm", "one-shot all-reduce beside lax.psum"),
    "dcp": ("jax_b12x.bench.dcp", "exchanges of decode context parallelism beside lax.all_to_all"),
    "layer": ("jax_b12x.bench.layer", "a layer with its shared expert overlapped, or split"),
    "moe": ("jax_b12x.bench.moe", "one mixture-of-experts layer against what JAX has"),
}


def load(name: str) -> Benchmark:
    """Returns the benchmark called ``name``, one of :data:`BENCHMARKS`."""
    return cast(Benchmark, importlib.import_module(BENCHMARKS[name][0]))
