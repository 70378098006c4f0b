"""The command line: ``python -m jax_b12x doctor | plan | bench``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from jax_b12x import __version__
from jax_b12x.consoles import console

# What a shell sees: it did not work, the arguments are wrong, somebody pressed Ctrl-C.
FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments after the program's name; ``sys.argv[1:]`` if ``None``.

    Returns:
      The exit status: 0, 1 where something failed, 2 for arguments that are wrong.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parser(argv).parse_args(argv)
        status: int = args.command(args)
        sys.stdout.flush()  # here, where a closed pipe is met calmly
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:  # our messages name the argument; ConfigError is one of them
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except (ImportError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_b12x",
        description="Mixture-of-experts decode kernels and one-shot collectives for JAX.",
    )
    parser.add_argument("--version", action="version", version=f"jax_b12x {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    doctor = commands.add_parser(
        "doctor", help="what is installed and built, what the devices can do, which paths run here"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of tables")
    doctor.set_defaults(command=_doctor)

    plan = commands.add_parser("plan", help="how a layer of given shapes is launched, and why")
    _add_plan_arguments(plan)
    plan.set_defaults(command=_plan)

    bench = commands.add_parser("bench", help="measure, side by side with what JAX has")
    _add_benchmarks(bench, argv)
    return parser


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from jax_b12x.bench import options

    parser.add_argument("--recipe", default="w4a16", help="w4a16 (default) or nvfp4")
    parser.add_argument(
        "--tokens",
        type=options.positives,
        default=(1,),
        metavar="T,...",
        help="numbers of tokens (default: 1)",
    )
    for name in ("hidden", "intermediate", "experts", "top-k"):
        parser.add_argument(f"--{name}", type=options.positive, required=True, metavar="N")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of x (default: bfloat16)",
    )
    parser.add_argument("--format", help="of the weights: nvfp4 or mxfp4")
    parser.add_argument(
        "--activation", default="silu", help="silu (default) or swiglu_oai (GPT-OSS)"
    )
    parser.add_argument(
        "--implementation", help="force fused, split, dynamic or reference instead of choosing"
    )
    parser.add_argument(
        "--device", default="here", help="here (default), cpu, h100 or h200: what to plan for"
    )


def _add_benchmarks(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    from jax_b12x import bench

    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, (_, summary) in bench.BENCHMARKS.items():
        one = benchmarks.add_parser(name, help=summary, description=summary)
        one.add_argument("--json", metavar="FILE", help="write the measurements as JSON")
        one.add_argument("--plot", metavar="FILE", help="draw them (.png, .svg); needs matplotlib")
        one.set_defaults(command=_bench, benchmark=name)
        if name in argv:  # the others' modules, and JAX with them, need not be loaded
            bench.load(name).add_arguments(one)


def _doctor(args: argparse.Namespace) -> int:
    from jax_b12x import doctor, doctor_tables

    diagnosis = doctor.examine()
    if args.json:
        print(json.dumps(dataclasses.asdict(diagnosis), indent=1))
    else:
        doctor_tables.show(diagnosis, console())
    return 0 if diagnosis.healthy else FAILED


def _plan(args: argparse.Namespace) -> int:
    from jax_b12x import capability, moe
    from jax_b12x.moe.recipe import Activation

    if args.device == "here":
        device = capability.current()
    elif args.device in capability.KNOWN:
        device = capability.KNOWN[args.device]
    else:
        known = ", ".join(capability.KNOWN)
        raise ValueError(f"--device is {args.device!r}; it must be here, {known}")
    plans = [
        moe.plan(
            args.recipe,
            num_tokens=num_tokens,
            hidden=args.hidden,
            intermediate=args.intermediate,
            num_experts=args.experts,
            top_k=args.top_k,
            dtype=args.dtype,
            activation=Activation(args.activation),
            weight_format=args.format,
            implementation=args.implementation,
            device=device,
        )
        for num_tokens in args.tokens
    ]
    print("\n\n".join(plan.explain() for plan in plans))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from jax_b12x import bench

    _check_outputs(args)
    benchmark = bench.load(args.benchmark)
    errors = Console(stderr=True)
    with errors.status("starting") as status:
        report = benchmark.run(args, lambda what: status.update(what))
    console().print(benchmark.table(report))
    if args.json:
        pathlib.Path(args.json).write_text(report.to_json() + "\n")
    if args.plot:
        benchmark.plot(report, args.plot)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses files that cannot be written before minutes of measuring are spent on them."""
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path and not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{option} is {path}; its folder does not exist")
    if args.plot:
        from jax_b12x.bench import plot

        plot.check(args.plot)
