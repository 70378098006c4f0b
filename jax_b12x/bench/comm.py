"""``bench comm``: one-shot all-reduce beside ``lax.psum``, a step in a chain that XLA captures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Group, RenderableType
from rich.table import Table

from jax_b12x import comm
from jax_b12x.bench import Progress, options, ranks, timing
from jax_b12x.bench import plot as plot_lib
from jax_b12x.bench.measurement import Environment, Measurement, Report

P = PartitionSpec
_EPS = 1e-6
_SUMS = ("multiply", "psum", "all_reduce")
_NORMS = ("psum + norm", "all_reduce_rms_norm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's own options."""
    parser.add_argument(
        "--kib",
        type=options.positives,
        default=(8, 32, 96, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        metavar="K,...",
        help="message sizes, KiB a rank (default: 8 to 65536)",
    )
    parser.add_argument("--hidden", type=options.positive, default=6144, metavar="N")
    parser.add_argument("--ranks", type=options.positive, default=2, metavar="N")
    parser.add_argument("--steps", type=options.positive, default=64, help="steps of a chain")
    parser.add_argument("--samples", type=options.positive, default=15)


def run(args: argparse.Namespace, progress: Progress) -> Report:
    """Measures."""
    mesh = Mesh(np.array(ranks.devices(args.ranks)), ("tp",))
    measurements: list[Measurement] = []
    for kib in args.kib:
        rows = max(1, round(kib * 1024 / (2 * args.hidden)))
        with comm.ChannelPool(mesh, "tp", cutoff=2**30, timeout=20) as pool:
            flat = {"kib": kib, "op": "sum"}
            progress(f"sums of {kib} KiB")
            calls = {what: _chain(what, (kib * 512,), mesh, pool, args.steps) for what in _SUMS}
            measurements += timing.chains(calls, flat, args.steps, args.samples)
            progress(f"norms of {kib} KiB")
            shape = (rows, args.hidden)
            calls = {what: _chain(what, shape, mesh, pool, args.steps) for what in _NORMS}
            measurements += timing.chains(
                calls, {"kib": kib, "op": "norm"}, args.steps, args.samples
            )
    arguments = {name: value for name, value in vars(args).items() if name in _ARGUMENTS}
    return Report("comm", arguments, Environment.current(), tuple(measurements))


_ARGUMENTS = ("kib", "hidden", "ranks", "steps", "samples")


def _chain(
    what: str, shape: tuple[int, ...], mesh: Mesh, pool: comm.ChannelPool, steps: int
) -> Callable[[], Any]:
    """Returns a call of a program of ``steps`` steps, each on what the one before it gave."""
    half = jnp.bfloat16(0.5)
    weight = jnp.ones(shape[-1:], jnp.bfloat16)

    def step(x: Any, residual: Any) -> tuple[Any, Any]:
        if what == "multiply":
            return lax.optimization_barrier(x * half), residual
        if what == "psum":
            return lax.psum(x, "tp") * half, residual
        if what == "all_reduce":
            return comm.all_reduce(x, pool) * half, residual
        if what == "all_reduce_rms_norm":
            return comm.all_reduce_rms_norm(x, residual, weight, _EPS, pool)
        residual = lax.psum(x, "tp") + residual
        wide = residual.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
        return (wide * scale).astype(x.dtype) * weight, residual

    def body(x: Any, residual: Any) -> Any:
        for _ in range(steps):
            x, residual = step(x, residual)
        return x, residual

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    )
    whole = (shape[0] * mesh.devices.size, *shape[1:])
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(
            rng.standard_normal(whole, np.float32).astype(jnp.bfloat16),
            NamedSharding(mesh, P("tp")),
        )
        for _ in range(2)
    ]
    return lambda: program(*arrays)


def crossover(report: Report) -> int | None:
    """Returns the size in bytes from which on psum won; None where it never did."""
    wins = None
    for case, row in report.rows():
        if case["op"] != "sum":
            continue
        if row["psum"].seconds <= row["all_reduce"].seconds:
            wins = wins or int(case["kib"]) * 1024
        else:
            wins = None
    return wins


def table(report: Report) -> RenderableType:
    """Returns the report as a table for people."""
    sums = Table(title="µs a step (op + elementwise multiply)", title_justify="left")
    norms = Table(title="µs a step (sum, residual add, RMS norm)", title_justify="left")
    for one, columns in ((sums, _SUMS), (norms, _NORMS)):
        one.add_column("KiB a rank", justify="right")
        for column in (*columns, "times faster"):
            one.add_column(column, justify="right")
    for case, row in report.rows():
        one, columns = (sums, _SUMS) if case["op"] == "sum" else (norms, _NORMS)
        times = [row[column].microseconds for column in columns]
        one.add_row(
            str(case["kib"]), *(f"{each:.2f}" for each in times), f"{times[-2] / times[-1]:.1f}"
        )
    size = crossover(report)
    verdict = "psum wins at no size here" if size is None else f"psum wins from {size:,} bytes on"
    return Group(sums, norms, verdict, str(report.environment))


def plot(report: Report, path: str) -> None:
    """Draws the report into a picture file."""
    plot_lib.times(report, path, x="kib", panel=("op",), dashed=("multiply", "psum", "psum + norm"))
