"""Directives of the documentation site that show what the package itself says."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from jax_b12x import config
from jax_b12x.bench.measurement import Report

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


class EnvironmentVariables(Directive):
    """``environment-variables``: a table of every variable in ``jax_b12x/config.py``."""

    def run(self) -> list[nodes.Node]:
        """Returns the table."""
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


class BenchmarkResults(Directive):
    """``benchmark-results``: the reports in ``docs/benchmarks``, each as a table, times in µs."""

    def run(self) -> list[nodes.Node]:
        """Returns a section for each report."""
        files = sorted(RESULTS.glob("*.json"))
        if not files:
            return [nodes.paragraph("", nodes.Text("No results have been committed yet."))]
        return [_report(file) for file in files]


def _report(file: pathlib.Path) -> nodes.section:
    report = Report.from_json(file.read_text())
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
    section = nodes.section(ids=[nodes.make_id(file.stem)])
    section += nodes.title("", f"{report.benchmark}: {file.stem}")
    section += nodes.paragraph("", f"{report.environment}. Medians in µs.")
    section += table([*columns, *timed], rows, [1] * (len(columns) + len(timed)))
    return section


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
