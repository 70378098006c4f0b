"""Pictures of reports; needs matplotlib (``pip install "jax_b12x[plot]"``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_b12x.bench.measurement import Report, Value


class PlotError(RuntimeError):
    """A picture cannot be drawn."""


def times(
    report: Report,
    path: str,
    *,
    x: str,
    panel: Sequence[str],
    dashed: Sequence[str] = (),
) -> None:
    """Draws times over one field of the cases, a panel for each value of some others.

    Args:
      report: what was measured.
      path: the picture; its ending says the format (``.png``, ``.svg``).
      x: the field of a case along the horizontal axis.
      panel: the fields of a case that a panel holds fixed.
      dashed: which things are baselines, drawn dashed.

    Raises:
      PlotError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    panels: dict[str, dict[str, list[tuple[Value, float]]]] = {}
    for case, row in report.rows():
        lines = panels.setdefault(_title(case, panel), {})
        for what, measurement in row.items():
            lines.setdefault(what, []).append((case[x], measurement.microseconds))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4.5 * len(panels), 4.2), squeeze=False, sharey=True
    )
    explained: set[str] = set()
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for what, points in lines.items():
            points.sort()
            style = "--" if what in dashed else "-"
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=what)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({point[0] for points in lines.values() for point in points})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel(x.replace("_", " "))
        axis.set_title(title, fontsize=9)
        axis.grid(True, which="major", alpha=0.3)
        if explained != set(lines):
            axis.legend(fontsize=8)
            explained = set(lines)
    axes[0][0].set_ylabel("µs per call (median)")
    save(figure, report, path)


def check(path: str) -> None:
    """Says early that a picture cannot be drawn.

    Raises:
      PlotError: matplotlib is not installed.
      ValueError: the path's ending is no format that matplotlib writes.
    """
    formats = _pyplot().figure().canvas.get_supported_filetypes()
    _pyplot().close("all")
    ending = path.rpartition(".")[2].lower()
    if ending not in formats:
        raise ValueError(f"--plot is {path}; it must end with one of {', '.join(sorted(formats))}")


def save(figure: Any, report: Report, path: str) -> None:
    """Writes a figure with the report's environment below it."""
    figure.text(0.01, 0.005, str(report.environment), fontsize=6, color="0.35")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise PlotError(
            'matplotlib is not installed; `pip install "jax_b12x[plot]"` brings it'
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _title(case: Mapping[str, Value], fields: Sequence[str]) -> str:
    return ", ".join(f"{field.replace('_', ' ')} {case[field]}" for field in fields)
