"""Continues a prompt: ``python -m examples.flax_moe.generate --prompt "Jonah1:1 Now the word"``."""

from __future__ import annotations

import argparse
import pathlib
import time

import jax
import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from examples.flax_moe import checkpoint, data, profile, serving
from examples.flax_moe.decode import Generator, Statistics

# From a book that the model was not trained on.
DEFAULT_PROMPT = "Ruth1:1 Now it came to pass in the days when the judges ruled, that"


def warm_up(generator: Generator, prompt: np.ndarray, *, speculative: bool = True) -> None:
    """Compiles all that a generation runs."""
    jax.block_until_ready(generator.generate(prompt[:5], 2, speculative=speculative))


def stream(
    console: Console,
    generator: Generator,
    prompt: str,
    max_new_tokens: int,
    *,
    speculative: bool,
    temperature: float,
    seed: int,
) -> tuple[str, Statistics, float]:
    """Shows the continuation as it comes, below it how far it is and how fast.

    Returns:
      The continuation, the statistics, and the seconds that it took.
    """
    statistics = Statistics.empty(generator.config.drafts)
    tokens = generator.stream(
        data.encode(prompt.encode()),
        max_new_tokens,
        speculative=speculative,
        temperature=temperature,
        seed=seed,
        statistics=statistics,
    )
    text = Text(prompt, style="dim")
    progress = Progress(
        TextColumn("[progress.description]writing"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} bytes, {task.fields[rate]}"),
        console=console,
    )
    task = progress.add_task("", total=max_new_tokens, rate="")
    pieces: list[str] = []
    begun = time.perf_counter()
    with Live(Group(Panel(text), progress), console=console, refresh_per_second=12):
        for piece in tokens:
            pieces.append(data.decode(piece))
            text.append(pieces[-1], style="bold")
            rate = statistics.tokens / (time.perf_counter() - begun)
            progress.update(task, completed=statistics.tokens, rate=f"{rate:.0f} tokens/s")
        seconds = time.perf_counter() - begun
    return "".join(pieces), statistics, seconds


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, default=checkpoint.SHIPPED, metavar="DIR"
    )
    parser.add_argument("--recipe", choices=("nvfp4", "w4a16"), default="nvfp4")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("--tokens", type=int, default=400, help="bytes to write")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--speculative",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify drafts of the multi-token-prediction head; greedy text is the same without",
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="to split the experts over; CPU devices will do"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="first measure memory, with executables that are thrown away",
    )
    options = parser.parse_args(argv)
    console = Console()
    try:
        prompt = data.encode(options.prompt.encode())
        devices = serving.choose_devices(options.devices)
        with console.status("loading and compiling"):
            model, _ = checkpoint.load_quantized(options.checkpoint, recipe=options.recipe)
            generator = Generator(*serving.serve(model, devices))
            if options.profile:
                console.print(profile.table(profile.profile(generator)))
            warm_up(generator, prompt, speculative=options.speculative)
        _, statistics, seconds = stream(
            console,
            generator,
            options.prompt,
            options.tokens,
            speculative=options.speculative,
            temperature=options.temperature,
            seed=options.seed,
        )
    except ValueError as error:
        parser.error(str(error))
    console.print(
        f"{statistics.tokens / seconds:.0f} tokens/s, {statistics.steps} calls of the model"
    )
    if options.speculative:
        console.print(
            f"{statistics.acceptance:.0%} of the drafts accepted, "
            f"{statistics.tokens_per_step:.2f} tokens a call"
        )


if __name__ == "__main__":
    main()
