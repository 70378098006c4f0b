"""``bench dcp``: the exchanges of decode context parallelism beside what JAX has for them.

A step of a captured chain is an exchange and an elementwise operation that brings its result back
to the shape of its input; ``elementwise`` is that operation alone.
"""

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
from jax_b12x.comm import dcp_primitives

P = PartitionSpec
_COMBINES = ("elementwise", "all_to_all + combine", "dcp_combine")
_GATHERS = ("elementwise", "all_gather", "dcp_gather_heads")
_LINK_BYTES = 256 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's own options."""
    parser.add_argument(
        "--shapes",
        type=options.shapes,
        default=((64, 128), (128, 512)),
        metavar="HxD,...",
        help="heads x head_dim (default: 64x128,128x512)",
    )
    parser.add_argument(
        "--batch",
        type=options.positives,
        default=(1, 8, 64),
        metavar="B,...",
        help="tokens (default: 1,8,64)",
    )
    parser.add_argument("--ranks", type=options.positive, default=2, metavar="N")
    parser.add_argument("--steps", type=options.positive, default=64, help="steps of a chain")
    parser.add_argument("--samples", type=options.positive, default=15)


def run(args: argparse.Namespace, progress: Progress) -> Report:
    """Measures."""
    devices = ranks.devices(args.ranks, least=2)
    for heads, head_dim in args.shapes:
        if heads % args.ranks or head_dim % 8 or head_dim > 1024:
            raise ValueError(
                f"--shapes has {heads}x{head_dim}; heads must be divisible by the ranks and "
                "head_dim a multiple of 8 up to 1024"
            )
    mesh = Mesh(np.array(devices), ("dcp",))
    measurements: list[Measurement] = []
    progress("the link")
    measurements += timing.chains({"swap": _swap(mesh)}, {"op": "link"}, 1, args.samples)
    for heads, head_dim in args.shapes:
        for batch in args.batch:
            case = {"heads": heads, "head_dim": head_dim, "batch": batch}
            shape = (batch, heads, head_dim)
            with comm.DcpPool(mesh, "dcp", cutoff=2**30, timeout=20) as pool:
                for op, names in (("combine", _COMBINES), ("gather", _GATHERS)):
                    progress(f"{op} of {batch} x {heads} x {head_dim}")
                    calls = {name: _chain(name, op, shape, pool, args.steps) for name in names}
                    measurements += timing.chains(
                        calls, {"op": op, **case}, args.steps, args.samples
                    )
    arguments = {name: value for name, value in vars(args).items() if name in _ARGUMENTS}
    return Report("dcp", arguments, Environment.current(), tuple(measurements))


_ARGUMENTS = ("shapes", "batch", "ranks", "steps", "samples")


def _swap(mesh: Mesh) -> Callable[[], Any]:
    """Returns a call that sends a large array to the next rank: what the link gives."""
    ranks = mesh.devices.size
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    program = jax.jit(
        jax.shard_map(
            lambda x: lax.ppermute(x, "dcp", ring), mesh=mesh, in_specs=P("dcp"), out_specs=P("dcp")
        )
    )
    array = jax.device_put(
        np.ones((ranks, _LINK_BYTES // 4), np.float32), NamedSharding(mesh, P("dcp"))
    )
    return lambda: program(array)


def _chain(
    what: str, op: str, shape: tuple[int, int, int], pool: comm.DcpPool, steps: int
) -> Callable[[], Any]:
    """Returns a call of a program of ``steps`` steps, each on what the one before it gave."""
    ranks = pool.world_size
    batch, heads, head_dim = shape
    local = heads // ranks
    half = jnp.bfloat16(0.5)

    def combine(x: Any, lse: Any) -> Any:
        if what == "elementwise":
            out = x[:, :local]
        elif what == "dcp_combine":
            out = comm.dcp_combine(x, lse, pool)
        else:
            out = _all_to_all_and_combine(x, lse, ranks)
        return lax.optimization_barrier(jnp.tile(out, (1, ranks, 1)) * half)

    def gather(x: Any, lse: Any) -> Any:
        del lse
        if what == "elementwise":
            whole = jnp.tile(x, (1, ranks, 1))
        elif what == "dcp_gather_heads":
            whole = comm.dcp_gather_heads(x, pool)
        else:
            whole = lax.all_gather(x, "dcp", axis=1, tiled=True)
        return lax.optimization_barrier((whole[:, :local] + whole[:, local : 2 * local]) * half)

    def body(x: Any, lse: Any) -> Any:
        x, lse = x[0], lse[0]
        for _ in range(steps):
            x = combine(x, lse) if op == "combine" else gather(x, lse)
        return x[None]

    program = jax.jit(
        jax.shard_map(
            body, mesh=pool.topology.mesh, in_specs=P("dcp"), out_specs=P("dcp"), check_vma=False
        )
    )
    rng = np.random.default_rng(0)
    rows = heads if op == "combine" else local
    sharding = NamedSharding(pool.topology.mesh, P("dcp"))
    x = rng.standard_normal((ranks, batch, rows, head_dim), np.float32).astype(jnp.bfloat16)
    lse = rng.standard_normal((ranks, batch, heads), np.float32)
    arrays = [jax.device_put(each, sharding) for each in (x, lse)]
    return lambda: program(*arrays)


def _all_to_all_and_combine(x: Any, lse: Any, ranks: int) -> Any:
    """What a JAX user writes today."""
    batch, heads, head_dim = x.shape
    parts = x.reshape(batch, ranks, heads // ranks, head_dim)
    parts = lax.all_to_all(parts, "dcp", split_axis=1, concat_axis=0)
    lses = lax.all_to_all(
        lse.reshape(batch, ranks, heads // ranks), "dcp", split_axis=1, concat_axis=0
    )
    weights = jax.nn.softmax(lses, axis=0)
    return jnp.sum(weights[..., None] * parts.astype(jnp.float32), axis=0).astype(x.dtype)


def _sent_bytes(case: Any, ranks: int) -> int:
    """The bytes that a rank sends to one peer."""
    shape = (int(case["batch"]), int(case["heads"]), int(case["head_dim"]))
    if case["op"] == "combine":
        whole = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return dcp_primitives.combine_bytes(whole, ranks)
    return shape[0] * shape[1] // ranks * shape[2] * 2


def table(report: Report) -> RenderableType:
    """Returns the report as a table for people."""
    ranks = int(report.arguments["ranks"])
    combines = Table(title="µs a step, combine", title_justify="left")
    gathers = Table(title="µs a step, gather of heads", title_justify="left")
    for one, columns in ((combines, _COMBINES), (gathers, _GATHERS)):
        for column in ("batch x heads x dim", *columns, "times faster", "KiB to a peer", "GB/s"):
            one.add_column(column, justify="right")
    link = 0.0
    for case, row in report.rows():
        if case["op"] == "link":
            link = _LINK_BYTES / row["swap"].seconds / 1e9
            continue
        one, columns = (combines, _COMBINES) if case["op"] == "combine" else (gathers, _GATHERS)
        alone, theirs, ours = (row[column].microseconds for column in columns)
        sent = _sent_bytes(case, ranks)
        one.add_row(
            f"{case['batch']} x {case['heads']} x {case['head_dim']}",
            *(f"{each:.2f}" for each in (alone, theirs, ours)),
            f"{theirs / ours:.1f}",
            f"{sent / 1024:.1f}",
            f"{sent * (ranks - 1) / max(ours - alone, 1e-3) / 1e3:.0f}",
        )
    note = (
        f"The link carried {link:.0f} GB/s each way (lax.ppermute of {_LINK_BYTES >> 20} MiB); the "
        "GB/s above are what a rank sends over the time of a step without its elementwise part."
    )
    return Group(combines, gathers, note, str(report.environment))


def plot(report: Report, path: str) -> None:
    """Draws the report into a picture file."""
    drawn = Report(
        report.benchmark,
        report.arguments,
        report.environment,
        tuple(one for one in report.measurements if one.case["op"] != "link"),
    )
    plot_lib.times(
        drawn,
        path,
        x="batch",
        panel=("op", "heads", "head_dim"),
        dashed=("elementwise", "all_gather", "all_to_all + combine"),
    )
