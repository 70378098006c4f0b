"""The doctor's report as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from jax_b12x.doctor import Diagnosis


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints a diagnosis, the problems last so that they are what the eye meets."""
    tables = [
        _pairs("Versions", diagnosis.versions.items()),
        _pairs("Built", _built(diagnosis)),
        _devices(diagnosis),
    ]
    if diagnosis.peer_access:
        tables.append(_peers(diagnosis.peer_access))
    if diagnosis.environment:
        tables.append(_pairs("Environment", diagnosis.environment.items()))
    for table in tables:
        console.print(table)
        console.print()
    if diagnosis.paths:
        paths, reasons = _paths(diagnosis)
        console.print(paths)
        for number, reason in enumerate(reasons, 1):
            console.print(Padding(f"({number}) {escape(reason)}", (0, 0, 0, 2)), style="dim")
        console.print()
    for hint in diagnosis.hints:
        console.print(f"[yellow]hint[/]: {escape(hint)}")
    for problem in diagnosis.problems:
        console.print(f"[red]problem[/]: {escape(problem)}")
    if diagnosis.healthy:
        console.print("[green]All is well.[/]")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = _table(title)
    table.show_header = False
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(f"  {name}", escape(value))
    return table


def _built(diagnosis: Diagnosis) -> Iterable[tuple[str, str]]:
    built, running = diagnosis.ffi_api_built, diagnosis.ffi_api_running
    yield "host extension", "yes" if built else "NO"
    if built:
        yield (
            "XLA FFI API",
            f"{_dotted(built)}; jaxlib here has {_dotted(running) if running else 'no headers'}",
        )
        widest = diagnosis.host_isas[-1] if diagnosis.host_isas else "none"
        used = widest if diagnosis.host_isa == "auto" else diagnosis.host_isa
        yield "CPU kernels", f"{', '.join(diagnosis.host_isas)}; in use: {used}"
    architectures = ", ".join(diagnosis.cuda_architectures)
    yield "CUDA half", f"yes {architectures}".strip() if diagnosis.cuda_built else "no"


def _devices(diagnosis: Diagnosis) -> Table:
    table = _table("Devices")
    for column in ("  device", "what"):
        table.add_column(column, style="cyan" if "device" in column else None, overflow="fold")
    for device in diagnosis.devices:
        what = device.capability
        if what is None:
            text = "not supported: neither a CPU nor an NVIDIA GPU"
        elif what.platform == "cpu":
            text = what.name
        else:
            text = (
                f"{what.name}: SM {what.sm / 10:.1f}, {what.sm_count} SMs, "
                f"L2 {what.l2_bytes / 2**20:.0f} MiB, "
                f"{what.shared_memory_bytes >> 10} KiB shared memory a block, "
                f"{'' if what.cooperative_launch else 'no '}cooperative launch"
            )
        table.add_row(f"  {device.name}", escape(text))
    if not diagnosis.devices:
        table.add_row("  none", "")
    return table


def _peers(matrix: tuple[tuple[bool, ...], ...]) -> Table:
    table = _table("Peer access (row reaches column)")
    table.add_column("  GPU", style="cyan")
    for index in range(len(matrix)):
        table.add_column(str(index))
    for index, row in enumerate(matrix):
        table.add_row(f"  {index}", *("yes" if reached else "no" for reached in row))
    return table


def _paths(diagnosis: Diagnosis) -> tuple[Table, list[str]]:
    """Returns the table of paths, and the reasons that its last column counts."""
    table = _table("Paths on the first device (top-8 of 128 experts, 2048 x 768, bfloat16)")
    for column in ("  recipe", "tokens", "path", "overlap", "why"):
        table.add_column(column, style="cyan" if "recipe" in column else None, overflow="fold")
    reasons = list(dict.fromkeys(reason for path in diagnosis.paths for reason in path.reasons))
    for path in diagnosis.paths:
        table.add_row(
            f"  {path.recipe}",
            f"{path.num_tokens:6}",
            path.implementation,
            path.overlap,
            " ".join(f"({reasons.index(reason) + 1})" for reason in path.reasons),
        )
    return table, reasons


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
