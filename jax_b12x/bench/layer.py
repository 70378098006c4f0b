"""``bench layer``: what overlapping the shared expert saves, and what splitting a layer costs.

A program is a chain of layers, each with weights of its own, together larger than the L2 cache. The
input of a layer is drawn for it, plus a little of the output of the one before, so that layers
cannot run at once and every layer routes as random tokens do. That step is an elementwise kernel,
which is in every time; alone it is the column ``step``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from rich.console import Group, RenderableType
from rich.table import Table

from jax_b12x import capability, comm, moe
from jax_b12x.bench import Progress, layer_data, options, ranks
from jax_b12x.bench import plot as plot_lib
from jax_b12x.bench.measurement import Environment, Measurement, Report, Value
from jax_b12x.bench.timing import chains
from jax_b12x.moe import layer_plan
from jax_b12x.moe.overlap_measured import OverlapCase, OverlapTimes
from jax_b12x.moe.recipe import RECIPES

_AXIS = "tp"
_LAYERS = 8  # of a chain: with one token each of the default shape they read 0.6 GB
# Times that a program for a GPU runs its chain, so that calling it does not show; the second where
# a step is short.
_REPEATS = (2, 16)
_FEEDBACK = 2.0**-10
_BESIDE: tuple[moe.Implementation, ...] = ("fused", "split")
_OVERLAPPED = (*_BESIDE, "joined")  # a row may lack the last one

# One layer of a chain: its input and its parameters, to its output.
Step: TypeAlias = Callable[[jax.Array, Any], jax.Array]
_Params: TypeAlias = list[moe.LayerParams]
# What is timed side by side, and the case that it is of.
_Chains: TypeAlias = tuple[dict[str, Value], dict[str, Step]]
_Compiling: TypeAlias = "concurrent.futures.Future[Callable[[], Any]]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's own options."""
    parser.add_argument(
        "--shape",
        type=options.shapes,
        metavar="HxI",
        help="hidden x intermediate of routed and shared experts (default: 4096x1408; on a CPU "
        "512x256)",
    )
    parser.add_argument("--experts", type=options.positive, metavar="E", help="default: 128; 16")
    parser.add_argument("--top-k", type=options.positive, metavar="K", help="default: 8; 4")
    parser.add_argument(
        "--shared",
        type=options.one_or_more_of(("dense", "nvfp4")),
        default=("dense", "nvfp4"),
        metavar="F,...",
        help="formats of the shared expert (default: dense,nvfp4)",
    )
    parser.add_argument(
        "--tokens",
        type=options.positives,
        default=tuple(range(1, 9)),
        metavar="T,...",
        help="numbers of tokens (default: 1 to 8)",
    )
    parser.add_argument(
        "--recipes",
        type=options.one_or_more_of(tuple(RECIPES)),
        default=tuple(RECIPES),
        metavar="R,...",
        help=f"of {', '.join(RECIPES)} (default: all)",
    )
    parser.add_argument(
        "--ranks",
        type=options.positive,
        default=1,
        metavar="N",
        help="with 2 or more: the layer split over so many devices, beside its parts",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument("--samples", type=options.positive, default=9)


def run(args: argparse.Namespace, progress: Progress) -> Report:
    """Measures."""
    devices = ranks.devices(args.ranks)
    on_gpu = capability.current().platform == "cuda"
    ((hidden, intermediate),) = args.shape or (((4096, 1408),) if on_gpu else ((512, 256),))
    experts = args.experts or (128 if on_gpu else 16)
    top_k = args.top_k or (8 if on_gpu else 4)
    mesh = Mesh(np.array(devices), (_AXIS,)) if args.ranks > 1 else None
    base = moe.MoELayer(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=top_k,
        shared_intermediate=intermediate,
        mesh=mesh,
        tensor_axis=None if mesh is None else _AXIS,
    )
    bench = _Bench(args, base, progress)
    if mesh is None:
        measurements = bench.measure(bench.overlapped)
    else:
        with comm.ChannelPool(mesh, _AXIS, timeout=20) as pool:
            measurements = bench.measure(functools.partial(bench.split, pool))
    arguments = {name: value for name, value in vars(args).items() if name in _ARGUMENTS}
    return Report("layer", arguments, Environment.current(), tuple(measurements))


_ARGUMENTS = (
    "experts",
    "ranks",
    "recipes",
    "samples",
    "seed",
    "shape",
    "shared",
    "tokens",
    "top_k",
)


class _Bench:
    """One layer shape, with the weights of a chain."""

    def __init__(self, args: argparse.Namespace, base: moe.MoELayer, progress: Progress):
        self.args = args
        self.base = base
        self.progress = progress
        progress("drawing experts")
        self.params = layer_data.random_chain(base, _LAYERS, args.seed)

    def measure(self, chosen: Callable[[moe.MoELayer, int], _Chains]) -> list[Measurement]:
        """Compiles everything, many programs at a time, then times case after case.

        Args:
          chosen: from a layer and a number of tokens to the chains to time side by side.
        """
        args = self.args
        cases: list[tuple[dict[str, Value], dict[str, _Compiling]]] = []
        with concurrent.futures.ThreadPoolExecutor() as threads:
            for shared_format in args.shared:
                params = layer_data.with_shared(self.base, self.params, shared_format, args.seed)
                of_format = dataclasses.replace(self.base, shared_format=shared_format)
                joins = of_format.local.join_obstacle is None
                joined = layer_data.joined(self.base, params) if joins else params
                if args.ranks > 1:
                    params = joined
                for recipe in args.recipes:
                    layer = dataclasses.replace(
                        self.base, recipe=recipe, shared_format=shared_format
                    )
                    for tokens in args.tokens:
                        self.progress(f"compiling {recipe}, {shared_format}, {tokens} tokens")
                        case, steps = chosen(layer, tokens)
                        programs = {
                            what: threads.submit(
                                self._program(
                                    step,
                                    tokens,
                                    joined if what == "joined" else params,
                                    self._repeats(what),
                                )
                            )
                            for what, step in steps.items()
                        }
                        cases.append((case, programs))
        measurements: list[Measurement] = []
        for case, programs in cases:
            self.progress(f"timing {case['recipe']}, {case['num_tokens']} tokens")
            calls = {what: program.result() for what, program in programs.items()}
            lengths = {what: _LAYERS * self._repeats(what) for what in calls}
            measurements += chains(calls, case, lengths, args.samples)
            programs.clear()
        return measurements

    def overlapped(self, layer: moe.MoELayer, tokens: int) -> _Chains:
        """Shared and routed experts alone, in a row, and overlapped."""
        routed = dataclasses.replace(layer, shared_intermediate=0)
        in_a_row = dataclasses.replace(layer, overlap="off")
        case = self._case(layer, tokens)
        steps: dict[str, Step] = {
            "step": _nothing,
            "shared": _shared_alone(layer, tokens),
            "routed": functools.partial(_routed_alone, routed),
            "serial": _forced(in_a_row, tokens, "fused"),
        }
        for launch in _BESIDE:
            steps[launch] = _forced(layer, tokens, launch)
            case[f"{launch}_order"] = layer.plan(tokens, implementation=launch, joined=False).order
        if layer.local.join_obstacle is None:
            made = layer.plan(tokens, joined=True)
            steps["joined"] = functools.partial(layer.partial, plan=made)
            case["joined_order"] = made.order
        return case, steps

    def split(self, pool: comm.ChannelPool, layer: moe.MoELayer, tokens: int) -> _Chains:
        """A layer that is split over devices, and its parts."""
        return self._case(layer, tokens), {
            "step": _nothing,
            "experts": lambda x, params: layer.partial(_varying(x), params),
            "all_reduce": functools.partial(_reduced, pool),
            "layer": functools.partial(layer, pool=pool),
            "psum": functools.partial(_psum_layer, layer),
        }

    def _repeats(self, what: str) -> int:
        if capability.current().platform == "cpu":
            return 1
        return _REPEATS[what in ("step", "all_reduce")]

    def _case(self, layer: moe.MoELayer, tokens: int) -> dict[str, Value]:
        local = layer.local
        return {
            "recipe": layer.recipe,
            "hidden": layer.hidden,
            "intermediate": local.intermediate,
            "num_experts": local.num_experts,
            "top_k": local.top_k,
            "shared_format": layer.shared_format,
            "shared_intermediate": local.shared_intermediate,
            "ranks": layer.world_size,
            "num_tokens": tokens,
        }

    def _program(
        self, step: Step, num_tokens: int, params: _Params, repeats: int
    ) -> Callable[[], Callable[[], Any]]:
        """Returns what compiles a program that runs a chain several times, to a call of it."""
        xs = jax.random.normal(
            jax.random.key(self.args.seed + num_tokens),
            (_LAYERS, num_tokens, self.base.hidden),
            jnp.bfloat16,
        )
        mesh = self.base.mesh

        def program(xs: jax.Array, params: list[moe.LayerParams]) -> jax.Array:
            out = jnp.zeros_like(xs[0])
            for _ in range(repeats):
                for index, one in enumerate(params):
                    # Parts differ from device to device; their chain goes on with each one's own.
                    out = step(xs[index] + out * _FEEDBACK, one)
            return out if mesh is None else _varying(out)

        if mesh is not None:
            specs = [self.base.param_specs(one) for one in params]
            program = jax.shard_map(
                program,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs),
                out_specs=PartitionSpec(_AXIS),
            )
        on_gpu = capability.current().platform == "cuda"
        flags: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1} if on_gpu else {}
        lowered = jax.jit(program).lower(xs, params)

        def compile() -> Callable[[], Any]:
            return functools.partial(lowered.compile(compiler_options=flags), xs, params)

        return compile


def _nothing(x: jax.Array, _: moe.LayerParams) -> jax.Array:
    return x


def _reduced(pool: comm.ChannelPool, x: jax.Array, _: moe.LayerParams) -> jax.Array:
    return comm.all_reduce(x, pool)


def _psum_layer(layer: moe.MoELayer, x: jax.Array, params: moe.LayerParams) -> jax.Array:
    summed: jax.Array = lax.psum(layer.partial(_varying(x), params), _AXIS)
    return summed


def _varying(x: jax.Array) -> jax.Array:
    """Marks ``x`` as a device's own."""
    known = jax.typeof(x).mat.varying
    return x if _AXIS in known else lax.pcast(x, (_AXIS,), to="varying")


def _routed_alone(layer: moe.MoELayer, x: jax.Array, params: moe.LayerParams) -> jax.Array:
    return layer.partial(x, dataclasses.replace(params, shared=None))


def _forced(layer: moe.MoELayer, num_tokens: int, launch: moe.Implementation) -> Step:
    """Returns a layer's part with its decode launched as ``launch`` says."""
    made = layer.plan(num_tokens, implementation=launch, joined=False)
    return lambda x, params: layer.partial(x, params, plan=made)


def _shared_alone(layer: moe.MoELayer, num_tokens: int) -> Step:
    """Returns the shared expert alone."""

    def step(x: jax.Array, params: moe.LayerParams) -> jax.Array:
        if isinstance(params.shared, moe.DenseExpert):
            return moe.dense_mlp(x, params.shared)
        assert isinstance(params.shared, moe.ExpertWeights)
        ids = jnp.zeros((num_tokens, 1), jnp.int32)
        weights = jnp.ones((num_tokens, 1), jnp.float32)
        return moe.fused_moe(x, params.shared, ids, weights, recipe=layer.recipe)

    return step


def overlap_times(report: Report) -> dict[OverlapCase, dict[int, OverlapTimes]]:
    """Returns what ``overlap_measured.py`` holds, of a report of one device."""
    names = [field.name for field in dataclasses.fields(OverlapCase)]
    times: dict[OverlapCase, dict[int, OverlapTimes]] = {}
    for case, row in report.rows():
        joins = "joined" in row
        if "split" not in row or not (joins or case["recipe"] in layer_plan.SPLIT_RECIPES):
            continue
        key = OverlapCase(**{name: case[name] for name in names})  # type: ignore[arg-type]
        us = {what: round(row[what].microseconds, 1) for what in _OVERLAPPED if what in row}
        made = OverlapTimes(date=report.environment.date[:10], **us)
        times.setdefault(key, {})[int(case["num_tokens"])] = made
    return times


def figures(row: Mapping[str, Measurement]) -> dict[str, float]:
    """Returns what the targets are about, of one row; without the step that is in every time.

    Overlapped is the fastest of those that a layer may take: fused and (where the recipe quantizes
    activations) split decode with the shared expert beside them, and the shared expert joined to
    the routed ones; ``over_longest`` compares it with the longer of shared and routed experts
    alone, ``saved`` with both in a row. ``over_parts`` compares a split layer with its experts and
    its all-reduce.
    """
    net = {what: one.microseconds - row["step"].microseconds for what, one in row.items()}
    if "layer" in row:
        return {"over_parts": net["layer"] / (net["experts"] + net["all_reduce"])}
    overlapped = net[_fastest(row)]
    return {
        "over_longest": overlapped / max(net["shared"], net["routed"]),
        "saved": net["serial"] / overlapped,
        "alike": max(net["shared"], net["routed"]) / min(net["shared"], net["routed"]),
    }


def _fastest(row: Mapping[str, Measurement]) -> str:
    left_out = () if row["fused"].case["recipe"] in layer_plan.SPLIT_RECIPES else ("split",)
    taken = [what for what in _OVERLAPPED if what in row and what not in left_out]
    return min(taken, key=lambda what: row[what].seconds)


def table(report: Report) -> RenderableType:
    """Returns the report as tables for people."""
    rows = list(report.rows())
    columns = list(dict.fromkeys(m.what for m in report.measurements))
    split = "layer" in columns
    case = rows[0][0]
    result = Table(
        title=f"A layer of {case['num_experts']} experts of {case['hidden']} x "
        f"{case['intermediate']} a device, top-{case['top_k']}, µs (median)\n{report.environment}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("recipe", "shared", "T", *columns):
        left = name in ("recipe", "shared") and name not in columns
        result.add_column(name, justify="left" if left else "right")
    for name in ("x parts",) if split else ("order", "x longest", "saved"):
        result.add_column(name, justify="right")
    for case, row in rows:
        made = figures(row)
        if split:
            ends = [f"{made['over_parts']:.2f}"]
        else:
            ends = [str(case[f"{_fastest(row)}_order"])]
            ends += [f"{made['over_longest']:.2f}", f"{made['saved']:.2f}"]
        result.add_row(
            str(case["recipe"]),
            str(case["shared_format"]),
            str(case["num_tokens"]),
            *(f"{row[name].microseconds:.1f}" if name in row else "" for name in columns),
            *ends,
        )
    caption = (
        "x parts: layer / (experts + all_reduce)"
        if split
        else "serial: fused decode, then the shared expert; fused, split: the shared expert beside "
        "them; joined: it is one of them; order: of the\nfastest that a layer may take; x longest: "
        "it / max(shared, routed); saved: serial / it"
    )
    return Group(result, f"{caption}. Ratios are without the step.")


def plot(report: Report, path: str) -> None:
    """Draws time over tokens, a panel for each recipe and format of the shared expert."""
    plot_lib.times(
        report, path, x="num_tokens", panel=("recipe", "shared_format"), dashed=("step",)
    )
