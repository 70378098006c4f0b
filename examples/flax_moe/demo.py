"""What `make demo` runs: the shipped model writes, then says how it did."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples.flax_moe import checkpoint, data, generate, score, serving
from examples.flax_moe.decode import Generator

RECIPE = "nvfp4"


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default=generate.DEFAULT_PROMPT)
    parser.add_argument("--tokens", type=int, default=360, help="bytes to write")
    parser.add_argument("--bytes", type=int, default=8192, help="of held-out text to measure")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument(
        "--devices", type=int, default=1, help="to split the experts over; CPU devices will do"
    )
    options = parser.parse_args(argv)
    console = Console()
    try:
        devices = serving.choose_devices(options.devices)
    except ValueError as error:
        parser.error(str(error))

    begun = time.perf_counter()
    with console.status("loading the NVFP4 checkpoint"):
        model, _ = checkpoint.load_quantized(checkpoint.SHIPPED, recipe=RECIPE)
    config = model.config
    console.print(
        f"A byte-level mixture of experts: {config.layers} layers of {config.num_experts} routed "
        f"experts (top-{config.top_k}) and a shared one,\nexperts stored and multiplied in NVFP4; "
        f"trained on the King James Bible. Loaded in {time.perf_counter() - begun:.1f} s."
    )
    model, pool = serving.serve(model, devices)
    generator = Generator(model, pool)
    with console.status("compiling"):
        generate.warm_up(generator, data.encode(options.prompt.encode()))
    _, statistics, seconds = generate.stream(
        console,
        generator,
        options.prompt,
        options.tokens,
        speculative=True,
        temperature=options.temperature,
        seed=0,
    )

    text = data.load_text().held_out[: options.bytes]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading held-out text")
        bits = score.bits_per_byte(
            model,
            text,
            batch=4,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )

    console.print("\n[bold]How each MoE layer runs, and why[/bold]")
    console.print(
        model.blocks[0].moe.layer.explain(1 + config.drafts, dtype=model.dtype), highlight=False
    )
    each = statistics.accepted / statistics.proposed
    table = Table(show_header=False, title="\nHow it did", title_justify="left")
    table.add_row("speed", f"{statistics.tokens / seconds:.0f} tokens/s (a token is a byte)")
    table.add_row(
        "drafts accepted",
        f"{statistics.acceptance:.0%} (1st {each[0]:.0%}, 2nd {each[1]:.0%}, 3rd {each[2]:.0%}); "
        f"{statistics.tokens_per_step:.2f} tokens a call of the model",
    )
    table.add_row(
        "held-out bits per byte",
        f"{bits:.3f}, on the first {text.size:,} bytes of the held-out books",
    )
    console.print(table)


if __name__ == "__main__":
    main()
