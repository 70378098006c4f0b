"""Measures the shipped model on the held-out books: ``python -m examples.flax_moe.evaluate``."""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.flax_moe import checkpoint, data, score, train
from examples.flax_moe.decode import Generator, Statistics
from examples.flax_moe.model import Decoder

PROMPT_BYTES = 64


def acceptance(
    model: Decoder, text: np.ndarray, *, prompts: int, tokens: int, progress: Progress | None = None
) -> Statistics:
    """Returns the statistics of greedy continuations of prompts spread evenly over ``text``."""
    generator = Generator(model)
    total = Statistics.empty(model.config.drafts)
    task = progress.add_task("drafts", total=prompts) if progress else None
    for start in np.linspace(0, text.size - PROMPT_BYTES, prompts, dtype=int):
        statistics = Statistics.empty(model.config.drafts)
        generator.generate(text[start : start + PROMPT_BYTES], tokens, statistics=statistics)
        total = total + statistics
        if progress is not None and task is not None:
            progress.advance(task)
    return total


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=pathlib.Path, default=checkpoint.SHIPPED, metavar="DIR"
    )
    parser.add_argument(
        "--bf16-checkpoint",
        type=pathlib.Path,
        metavar="DIR",
        help="what training wrote; without it the figure recorded at training time is shown",
    )
    parser.add_argument(
        "--bytes", type=int, help="of the held-out text, from its start; all if not given"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="bytes to write after each prompt")
    options = parser.parse_args(argv)
    console = Console()
    text = data.load_text().held_out[: options.bytes]

    table = Table(title=f"Held-out text, {text.size:,} bytes", title_justify="left")
    for column in (
        "experts",
        "bits per byte",
        "drafts accepted",
        "1st",
        "2nd",
        "3rd",
        "tokens a call",
    ):
        table.add_column(column, justify="left" if column == "experts" else "right")
    with Progress(console=console, transient=True) as progress:

        def measure(name: str, model: Decoder) -> None:
            task = progress.add_task(name)
            bits = score.bits_per_byte(
                model,
                text,
                batch=4,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
            statistics = acceptance(
                model, text, prompts=options.prompts, tokens=options.tokens, progress=progress
            )
            each = statistics.accepted / statistics.proposed
            rates = [f"{rate:.1%}" for rate in (statistics.acceptance, *each)]
            table.add_row(name, f"{bits:.4f}", *rates, f"{statistics.tokens_per_step:.2f}")

        if options.bf16_checkpoint is not None:
            config, arrays, _ = checkpoint.load_bf16(options.bf16_checkpoint)
            measure("bf16", train.with_parameters(config, arrays))
        for recipe in ("w4a16", "nvfp4"):
            model, record = checkpoint.load_quantized(options.checkpoint, recipe=recipe)
            measure(recipe, model)
    console.print(table)
    if options.bf16_checkpoint is None:
        console.print(
            f"bf16 experts: {record['held_out_bits_per_byte_bf16']} bits per byte on the first "
            f"{record['held_out_bytes']:,} bytes of the held-out text, recorded on "
            f"{record['date']} by\n  {record['command']}\n"
            "Pass --bf16-checkpoint to measure it here."
        )


if __name__ == "__main__":
    main()
