"""``bench moe``: one MoE layer, our paths against what JAX does without them.

On CPU, everything runs in one process on the same packed experts: the fused, split and dynamic
paths against the jitted ``jnp`` oracle, and against a gather of the touched experts from weights
that were dequantized to bfloat16 beforehand, which needs 3.6 times the memory.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jax_b12x import capability, moe
from jax_b12x.bench import Progress, data, moe_cuda, options
from jax_b12x.bench import plot as plots
from jax_b12x.bench.measurement import Environment, Measurement, Report, Value
from jax_b12x.bench.timing import take_turns
from jax_b12x.moe import reference
from jax_b12x.moe.recipe import RECIPES
from jax_b12x.moe.weights import ExpertWeights
from jax_b12x.quant import QuantizedTensor, nvfp4

IMPLEMENTATIONS: tuple[moe.Implementation, ...] = ("fused", "split", "dynamic")
BASELINES = ("oracle", "gather")
PATHS = (*IMPLEMENTATIONS, *BASELINES, *moe_cuda.BASELINES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "--shapes",
        type=options.shapes,
        default=((1024, 512),),
        metavar="HxI,...",
        help="hidden x intermediate, in columns (default: 1024x512)",
    )
    parser.add_argument(
        "--experts", type=options.positive, default=64, metavar="E", help="default: 64"
    )
    parser.add_argument(
        "--top-k", type=options.positive, default=4, metavar="K", help="routes a token; default: 4"
    )
    parser.add_argument(
        "--tokens",
        type=options.positives,
        default=(1, 2, 4, 8),
        metavar="T,...",
        help="numbers of tokens (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--recipes",
        type=options.one_or_more_of(tuple(RECIPES)),
        default=tuple(RECIPES),
        metavar="R,...",
        help=f"of {', '.join(RECIPES)} (default: all)",
    )
    parser.add_argument(
        "--paths",
        type=options.one_or_more_of(PATHS),
        metavar="P,...",
        help=f"of {', '.join(PATHS)} (default: those that the platform has)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and routes")
    parser.add_argument(
        "--seconds",
        type=options.seconds,
        default=1.0,
        metavar="S",
        help="how long to sample each path on each case (default: 1)",
    )


def run(args: argparse.Namespace, progress: Progress) -> Report:
    """Measures every case on the default device."""
    if args.top_k > args.experts:
        raise ValueError(f"--top-k is {args.top_k}; it must be at most --experts ({args.experts})")
    on_gpu = capability.current().platform == "cuda"
    args.paths = _paths(args, moe_cuda.paths() if on_gpu else (*IMPLEMENTATIONS, *BASELINES))
    if on_gpu:
        return _report(args, moe_cuda.measure(args, progress))
    measurements: list[Measurement] = []
    for hidden, intermediate in args.shapes:
        rng = np.random.default_rng(args.seed)
        progress(f"drawing {args.experts} experts of {hidden} x {intermediate}")
        weights = data.random_experts(rng, args.experts, hidden, intermediate)
        dense = _dequantized(weights) if "gather" in args.paths else None
        for recipe in args.recipes:
            for num_tokens in args.tokens:
                progress(f"{hidden} x {intermediate}, {recipe}, {num_tokens} tokens")
                measurements += _measure(args, rng, weights, dense, recipe, num_tokens)
    return _report(args, measurements)


def _paths(args: argparse.Namespace, here: Sequence[str]) -> tuple[str, ...]:
    """Returns the paths to measure, all of ``here`` where none was named."""
    if args.paths is None:
        return tuple(here)
    absent = [path for path in args.paths if path not in here]
    if absent:
        raise ValueError(
            f"--paths has {', '.join(absent)}; here it may have {', '.join(here)}"
            + ("" if "tokamax" not in absent else " (tokamax: on a GPU, once it is installed)")
        )
    if args.paths == ("gather",) and "w4a16" not in args.recipes:
        raise ValueError("--paths is gather, which measures --recipes w4a16 alone")
    return tuple(args.paths)


def _report(args: argparse.Namespace, measurements: list[Measurement]) -> Report:
    return Report(
        benchmark="moe",
        arguments={k: v for k, v in vars(args).items() if k not in ("json", "plot", "command")},
        environment=Environment.current(),
        measurements=tuple(measurements),
    )


def _measure(
    args: argparse.Namespace,
    rng: np.random.Generator,
    weights: ExpertWeights,
    dense: tuple[jax.Array, jax.Array] | None,
    recipe: str,
    num_tokens: int,
) -> list[Measurement]:
    x = jnp.asarray(rng.standard_normal((num_tokens, weights.hidden)), jnp.bfloat16)
    drawn_ids, drawn_weights = data.random_routes(rng, num_tokens, args.experts, args.top_k)
    ids, route_weights = jnp.asarray(drawn_ids), jnp.asarray(drawn_weights)
    case: dict[str, Value] = {
        "hidden": weights.hidden,
        "intermediate": weights.intermediate,
        "num_experts": args.experts,
        "top_k": args.top_k,
        "recipe": recipe,
        "num_tokens": num_tokens,
        "experts_touched": len(np.unique(drawn_ids)),
    }
    calls: dict[str, Callable[[], jax.Array]] = {}
    for implementation in IMPLEMENTATIONS:
        if implementation not in args.paths:
            continue
        plan = moe.plan(
            recipe,
            num_tokens=num_tokens,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            num_experts=args.experts,
            top_k=args.top_k,
            dtype=x.dtype,
            implementation=implementation,
        )
        ours = jax.jit(functools.partial(moe.fused_moe, plan=plan))
        calls[implementation] = functools.partial(ours, x, weights, ids, route_weights)
    if "oracle" in args.paths:
        oracle = jax.jit(functools.partial(reference.moe, recipe=recipe))
        calls["oracle"] = functools.partial(oracle, x, weights, ids, route_weights)
    if dense is not None and recipe == "w4a16":
        calls["gather"] = functools.partial(jax.jit(_gather), x, *dense, ids, route_weights)
    return take_turns(calls, case, seconds=args.seconds)


def _dequantized(weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
    """Returns w13 and w2 in bfloat16, one row and column for each of the packed ones."""

    def dequantize(packed: jax.Array, scale: jax.Array, global_scale: jax.Array) -> jax.Array:
        # One expert at a time: the fp32 values of all of them together may not fit.
        tensors = QuantizedTensor(packed, scale, global_scale, weights.format)
        dense: jax.Array = jax.lax.map(lambda one: nvfp4.dequantize(one, jnp.bfloat16), tensors)
        return dense

    w13_global = jnp.repeat(weights.w13_global_scale, weights.intermediate, axis=1)
    w2_global = jnp.broadcast_to(weights.w2_global_scale[:, None], weights.w2.shape[:2])
    return (
        jax.jit(dequantize)(weights.w13, weights.w13_scale, w13_global),
        jax.jit(dequantize)(weights.w2, weights.w2_scale, w2_global),
    )


def _gather(
    x: jax.Array, w13: jax.Array, w2: jax.Array, ids: jax.Array, route_weights: jax.Array
) -> jax.Array:
    """The layer as plain JAX writes it for few tokens: gather each route's expert and multiply."""
    product = jnp.einsum("th,tkih->tki", x, w13[ids], preferred_element_type=jnp.float32)
    gate, up = jnp.split(product, 2, axis=-1)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    y = jnp.einsum("tki,tkhi->tkh", h, w2[ids], preferred_element_type=jnp.float32)
    return jnp.einsum("tk,tkh->th", route_weights, y).astype(x.dtype)


def table(report: Report) -> Table:
    """Returns medians in µs, and how they compare: with the oracle, or on a GPU with the floor."""
    if moe_cuda.made(report):
        return moe_cuda.table(report)
    columns = list(dict.fromkeys(m.what for m in report.measurements))
    result = Table(
        title=f"One MoE layer, µs (median)\n{report.environment}",
        title_justify="left",
        caption="experts: those that the tokens visit; x: the oracle's time over our fastest",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("H x I", "recipe", "tokens", "experts", *columns, "x"):
        left = name in ("H x I", "recipe")
        result.add_column(name, justify="left" if left else "right", overflow="fold")
    for case, row in report.rows():
        ours = [row[name].seconds for name in IMPLEMENTATIONS if name in row]
        speedup = row["oracle"].seconds / min(ours) if ours and "oracle" in row else None
        result.add_row(
            f"{case['hidden']}x{case['intermediate']}",
            str(case["recipe"]),
            str(case["num_tokens"]),
            f"{case['experts_touched']}",
            *(f"{row[name].microseconds:,.0f}" if name in row else "" for name in columns),
            f"{speedup:.1f}" if speedup is not None else "",
        )
    return result


def plot(report: Report, path: str) -> None:
    """Draws time over tokens, a panel for each shape and recipe; on a GPU, time over bytes."""
    if moe_cuda.made(report):
        moe_cuda.plot(report, path)
        return
    plots.times(
        report, path, x="num_tokens", panel=("hidden", "intermediate", "recipe"), dashed=BASELINES
    )
