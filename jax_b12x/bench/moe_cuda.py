"""``bench moe`` on NVIDIA GPUs: chains of layers in one captured program, against the byte floor.

A layer alone would find its weights in L2, and a call alone would measure how fast Python calls.
So a program runs many layers after one another, each with weights and routes of its own, as a model
does; together they are several times the L2 cache. The floor of a layer is the time to read the
experts that its tokens really touch, at the bandwidth of a kernel that only reads, timed in the
same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jax_b12x import _native, moe
from jax_b12x.bench import Progress, data
from jax_b12x.bench import plot as plots
from jax_b12x.bench.measurement import Measurement, Report, Value
from jax_b12x.bench.timing import from_samples
from jax_b12x.moe.weights import ExpertWeights

IMPLEMENTATIONS: tuple[moe.Implementation, ...] = ("fused", "split")
BASELINES = ("ragged_dot", "tokamax")

_L2_MULTIPLE = 4
_L2_BYTES = 64 << 20
_PROGRAM_SECONDS = 2e-3  # a program runs at least about this long, so that calling it does not show
# Numbers are taken as well as the strings and booleans that older type hints of JAX name.
_GRAPH: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}

# A layer of a chain: x, its weights, its ids and its route weights, to the next x.
Layer = Callable[[jax.Array, Any, jax.Array, jax.Array], jax.Array]


def paths() -> tuple[str, ...]:
    """Returns what can be measured here: a baseline only where it is installed."""
    return (*IMPLEMENTATIONS, *(name for name in BASELINES if _ragged_dot(name) is not None))


def measure(args: argparse.Namespace, progress: Progress) -> list[Measurement]:
    """Times every path on every case; the options are those of ``bench moe``."""
    progress("read bandwidth")
    bandwidth = read_bandwidth()
    measurements: list[Measurement] = []
    for hidden, intermediate in args.shapes:
        cases = [_Case(args, hidden, intermediate, tokens, bandwidth) for tokens in args.tokens]
        depth = max(case.depth for case in cases)
        rng = np.random.default_rng(args.seed)
        progress(f"drawing {depth} layers of {hidden} x {intermediate}")
        layers = [
            _random_layer(rng, args.experts, hidden, intermediate, args.top_k) for _ in range(depth)
        ]
        for case in cases:
            for recipe in args.recipes:
                for implementation in IMPLEMENTATIONS:
                    if implementation in args.paths:
                        name = f"{recipe} {implementation}"
                        progress(f"{hidden} x {intermediate}, {case.num_tokens} tokens, {name}")
                        plan = _plan(recipe, implementation, case.x, layers[0], args.top_k)
                        layer = functools.partial(_ours, plan)
                        measurements.append(case.time(name, layer, layers, args.seconds))
        del layers
        for name in BASELINES:
            dot = _ragged_dot(name) if name in args.paths else None
            if dot is None:
                continue
            dense = [_random_dense(rng, args.experts, hidden, intermediate) for _ in range(2)]
            for case in cases:
                progress(f"{hidden} x {intermediate}, {case.num_tokens} tokens, {name}")
                # Traced once: a Pallas kernel takes a second for each call of a chain otherwise.
                once: Layer = jax.jit(functools.partial(_dense_layer, dot))
                measurements.append(case.time(f"{name} bf16", once, dense, args.seconds))
            del dense
    return measurements


class _Case:
    """A shape and a number of tokens, with inputs and routes for every layer of a chain."""

    def __init__(
        self,
        args: argparse.Namespace,
        hidden: int,
        intermediate: int,
        num_tokens: int,
        bandwidth: float,
    ):
        self.num_tokens = num_tokens
        expert_bytes = 3 * hidden * intermediate * 9 // 16
        fewest_bytes = min(num_tokens * args.top_k, args.experts) * expert_bytes // 2
        self.depth = max(4, math.ceil(_L2_MULTIPLE * _L2_BYTES / fewest_bytes))
        rng = np.random.default_rng([args.seed, num_tokens])
        self._routes = [
            data.random_routes(rng, num_tokens, args.experts, args.top_k) for _ in range(self.depth)
        ]
        self.x = jnp.asarray(rng.standard_normal((num_tokens, hidden)), jnp.bfloat16)
        touched = float(np.mean([len(np.unique(ids)) for ids, _ in self._routes]))
        self._floor = touched * expert_bytes / bandwidth
        self._case: dict[str, Value] = {
            "hidden": hidden,
            "intermediate": intermediate,
            "num_experts": args.experts,
            "top_k": args.top_k,
            "num_tokens": num_tokens,
            "experts_touched": round(touched, 1),
        }
        self._figures: dict[str, Value] = {
            "floor_us": self._floor * 1e6,
            "bytes": touched * expert_bytes,
            "bandwidth": bandwidth,
        }

    def time(self, name: str, layer: Layer, weights: Sequence[Any], seconds: float) -> Measurement:
        """Times a chain over ``weights``, as many of them as the case wants and there are."""
        weights = weights[: self.depth]
        routes = self._routes[: len(weights)]
        times = _time_chain(layer, self.x, weights, routes, 2 * self._floor + 5e-6, seconds)
        one = from_samples(name, self._case, times)
        figures = {**self._figures, "over_floor": one.seconds / self._floor}
        return dataclasses.replace(one, figures=figures)


def made(report: Report) -> bool:
    """Returns whether :func:`measure` made a report."""
    return any("floor_us" in m.figures for m in report.measurements)


def table(report: Report) -> Table:
    """Returns medians in µs beside the byte floor, and the best of ours over it."""
    columns = list(dict.fromkeys(m.what for m in report.measurements))
    result = Table(
        title=f"One MoE layer in a captured chain, µs (median)\n{report.environment}",
        title_justify="left",
        caption="floor: reading the touched experts' packed weights once; x: best of ours over it",
        caption_justify="left",
    )
    for name in ("H x I", "experts", "tokens", "touched", "floor"):
        result.add_column(name, justify="left" if name == "H x I" else "right")
    for name in columns:
        result.add_column(name, justify="right")
    result.add_column("x", justify="right")
    for case, row in report.rows():
        floor = float(next(iter(row.values())).figures["floor_us"])
        ours = [m.microseconds for name, m in row.items() if not name.endswith("bf16")]
        result.add_row(
            f"{case['hidden']}x{case['intermediate']}",
            str(case["num_experts"]),
            str(case["num_tokens"]),
            str(case["experts_touched"]),
            f"{floor:.1f}",
            *(f"{row[name].microseconds:,.1f}" if name in row else "" for name in columns),
            f"{min(ours) / floor:.2f}" if ours else "",
        )
    return result


def plot(report: Report, path: str) -> None:
    """Draws time over the bytes that a layer must read, with the roofline below."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 5))
    points: dict[str, list[tuple[float, float]]] = {}
    for one in report.measurements:
        points.setdefault(one.what, []).append((float(one.figures["bytes"]), one.microseconds))
    for what, places in points.items():
        style = "x" if what.endswith("bf16") else "o"
        axis.plot(*zip(*sorted(places), strict=True), style, markersize=5, label=what)
    bandwidth = float(report.measurements[0].figures["bandwidth"])
    sizes = np.geomspace(
        min(b for p in points.values() for b, _ in p), max(b for p in points.values() for b, _ in p)
    )
    axis.plot(sizes, sizes / bandwidth * 1e6, "-", color="0.3", label="byte floor")
    axis.plot(
        sizes, sizes / bandwidth / 0.8 * 1e6 + 2, ":", color="0.3", label="floor / 0.8 + 2 µs"
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes of packed weights that the layer's tokens touch")
    axis.set_ylabel("µs a layer (median)")
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(fontsize=8)
    plots.save(figure, report, path)


def read_bandwidth(size: int = 4 << 30) -> float:
    """Returns bytes a second of a kernel that only reads ``size`` bytes of device memory."""
    _native.ensure_registered()
    buffer = jax.random.bits(jax.random.key(0), (size,), jnp.uint8)
    read = jax.jit(
        lambda b: jax.ffi.ffi_call(
            "b12x_read_bandwidth", jax.ShapeDtypeStruct((1,), jnp.uint32), has_side_effect=True
        )(b)
    )
    return size / float(np.median(_sample(lambda: read(buffer), 1, 0.2)))


def _plan(
    recipe: str,
    implementation: moe.Implementation,
    x: jax.Array,
    weights: ExpertWeights,
    top_k: int,
) -> moe.MoePlan:
    return moe.plan(
        recipe,
        num_tokens=x.shape[0],
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        num_experts=weights.num_experts,
        top_k=top_k,
        dtype=x.dtype,
        implementation=implementation,
    )


def _ours(
    plan: moe.MoePlan, x: jax.Array, weights: ExpertWeights, ids: jax.Array, route: jax.Array
) -> jax.Array:
    return moe.fused_moe(x, weights, ids, route, plan=plan)


def _random_layer(
    rng: np.random.Generator, num_experts: int, hidden: int, intermediate: int, top_k: int
) -> ExpertWeights:
    """Draws packed experts on the device; unit-variance activations stay so."""
    key = jax.random.key(int(rng.integers(1 << 30)))

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        return (
            jax.random.bits(keys[0], (num_experts, 2 * intermediate, hidden // 2), jnp.uint8),
            _scales(keys[1], (num_experts, 2 * intermediate, hidden // 16)),
            jax.random.bits(keys[2], (num_experts, hidden, intermediate // 2), jnp.uint8),
            _scales(keys[3], (num_experts, hidden, intermediate // 16)),
        )

    rms = 2.926  # of the sixteen E2M1 values
    weights = ExpertWeights.from_arrays(
        *draw(key),
        w13_global_scale=1 / (rms * math.sqrt(hidden)),
        w2_global_scale=2.5 / (rms * math.sqrt(intermediate)),  # SiLU and the routes' sum shrink
        w13_input_scale=8 / (6 * 448),
        w2_input_scale=8 / (6 * 448),
    )
    x = jnp.zeros((1, hidden), jnp.bfloat16)
    return weights.prepare(_plan("w4a16", "split", x, weights, top_k), donate=True)


def _scales(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # E4M3 codes of 0.5 to 1.75, without a temporary of wider floats.
    codes: jax.Array = jax.random.bits(key, shape, jnp.uint8) % 16 + jnp.uint8(0x30)
    return codes


def _random_dense(
    rng: np.random.Generator, num_experts: int, hidden: int, intermediate: int
) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, rows: int, columns: int) -> jax.Array:
        shape = (num_experts, rows, columns)
        normal: jax.Array = jax.random.normal(key, shape, jnp.bfloat16)
        return normal * (1 / math.sqrt(rows))

    return draw(keys[0], hidden, 2 * intermediate), draw(keys[1], intermediate, hidden)


def _ragged_dot(name: str) -> Callable[..., jax.Array] | None:
    if name == "ragged_dot":
        return jax.lax.ragged_dot
    try:
        import tokamax
    except ImportError:
        return None
    dot: Callable[..., jax.Array] = tokamax.ragged_dot
    return dot


def _dense_layer(
    dot: Callable[..., jax.Array],
    x: jax.Array,
    weights: tuple[jax.Array, jax.Array],
    ids: jax.Array,
    route: jax.Array,
) -> jax.Array:
    """The layer as JAX users write it: sort by expert, two grouped products, weighted sum."""
    w13, w2 = weights
    order = jnp.argsort(ids.reshape(-1))
    sizes = jnp.bincount(ids.reshape(-1), length=w13.shape[0]).astype(jnp.int32)
    token = order // ids.shape[1]
    gate, up = jnp.split(dot(x[token], w13, sizes), 2, axis=-1)
    y = dot((jax.nn.silu(gate) * up).astype(x.dtype), w2, sizes)
    y = y.astype(jnp.float32) * route.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(y).astype(x.dtype)


def _time_chain(
    layer: Layer,
    x: jax.Array,
    weights: Sequence[Any],
    routes: Sequence[tuple[np.ndarray, np.ndarray]],
    estimate: float,
    seconds: float,
) -> list[float]:
    """Returns samples of the time of one layer, in seconds."""
    repeats = max(1, min(32, round(_PROGRAM_SECONDS / (estimate * len(weights)))))

    def chain(x: jax.Array, weights: Sequence[Any], routes: Sequence[Any]) -> jax.Array:
        for _ in range(repeats):
            for layer_weights, (ids, route) in zip(weights, routes, strict=True):
                x = layer(x, layer_weights, ids, route)
        return x

    arrays = [(jnp.asarray(ids), jnp.asarray(route)) for ids, route in routes]
    compiled = jax.jit(chain).lower(x, list(weights), arrays).compile(compiler_options=_GRAPH)
    return _sample(lambda: compiled(x, list(weights), arrays), repeats * len(weights), seconds)


def _sample(call: Callable[[], Any], layers: int, seconds: float) -> list[float]:
    for _ in range(3):  # runs, is captured, is replayed
        jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    queued = max(2, min(50, round(0.02 / max(time.perf_counter() - start, 1e-6))))
    samples: list[float] = []
    stop = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < stop:
        start = time.perf_counter()
        for _ in range(queued):
            # A result that is still held when the next run starts would give that run another
            # address for its own, and XLA captures a program again for every address.
            result = None
            result = call()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / (queued * layers))
    return samples
