"""Directives of the documentation site that show what the package itself says."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from jax_b12x import config
from jax_b12x.bench.measurement import Report

DOCS = pathlib.Path(__file__).resolve().parent.parent
RESULTS = DOCS.parent / "benchmarks" / "results"


class EnvironmentVariables(SphinxDirective):
    """``environment-variables``: a table of every variable in ``jax_b12x/config.py``."""

    def run(self) -> list[nodes.Node]:
        """Returns the table."""
        self.env.note_reread()
        rows = [
            (
                f"`{variable.name}`",
                variable.allowed,
                "unset" if variable.default is None else f"`{_as_typed(variable.default)}`",
                variable.meaning,
            )
            for variable in config.ALL
        ]
        return [table(("variable", "allowed", "default", "meaning"), rows, (22, 22, 12, 44))]


class BenchmarkResults(SphinxDirective):
    """``benchmark-results``: every committed report as a table, times in µs, and its plot."""

    def run(self) -> list[nodes.Node]:
        """Returns a section for each report."""
        self.env.note_reread()
        files = sorted(RESULTS.glob("*.json"))
        if not files:
            return [nodes.paragraph("", nodes.Text("No results have been committed yet."))]
        return [_report(file) for file in files]


def _report(file: pathlib.Path) -> nodes.section:
    data = json.loads(file.read_text())
    if "measurements" in data:
        where, head, rows = _of_the_package(Report.from_json(file.read_text()))
    else:
        where, head, rows = _of_the_kernels(data)
    section = nodes.section(ids=[nodes.make_id(file.stem)])
    section += nodes.title("", f"{data['benchmark']}: {file.stem}")
    section += nodes.paragraph("", f"{where} Medians in µs.")
    plot = file.with_suffix(".png")
    if plot.exists():
        section += nodes.image(
            uri=os.path.relpath(plot, DOCS), alt=f"{data['benchmark']} as a plot", width="100%"
        )
    section += table(head, rows, [1] * len(head))
    return section


def _of_the_package(report: Report) -> tuple[str, list[str], list[list[str]]]:
    """Returns where a report of ``python -m jax_b12x bench`` was made, and its table."""
    cases = list(report.rows())
    columns = list(dict.fromkeys(name for case, _ in cases for name in case))
    timed = list(dict.fromkeys(name for _, measured in cases for name in measured))
    rows = [
        [
            *(f"{case.get(name, '')}" for name in columns),
            *(f"{measured[name].microseconds:,.1f}" if name in measured else "" for name in timed),
        ]
        for case, measured in cases
    ]
    return f"{report.environment}.", [*columns, *timed], rows


def _of_the_kernels(data: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Returns the same of kernels that were timed without JAX around them."""
    columns = [name for name, value in data["rows"][0].items() if not isinstance(value, dict)]
    timed = list(dict.fromkeys(name for row in data["rows"] for name in row["paths"]))
    rows = [
        [
            *(f"{row.get(name, '')}" for name in columns),
            *(f"{row['paths'][name]['us']:,.1f}" if name in row["paths"] else "" for name in timed),
        ]
        for row in data["rows"]
    ]
    where = f"{data['date']}; {data['hardware']}. {data['method']}"
    return where, [*columns, *timed], rows


def _as_typed(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> nodes.table:
    """Returns a table; text between backticks is set as code.

    Args:
      head: titles of the columns.
      rows: the cells of each row.
      widths: relative widths of the columns.
    """
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", _row(head))
    body = nodes.tbody()
    body += [_row(row) for row in rows]
    group += body
    result = nodes.table()
    result += group
    return result


def _row(cells: Sequence[str]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        paragraph = nodes.paragraph()  # text between backticks is code
        for index, part in enumerate(cell.split("`")):
            paragraph += nodes.literal("", part) if index % 2 else nodes.Text(part)
        row += nodes.entry("", paragraph)
    return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("environment-variables", EnvironmentVariables)
    app.add_directive("benchmark-results", BenchmarkResults)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
