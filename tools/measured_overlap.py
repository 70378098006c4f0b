"""Writes the table of ``moe/overlap_measured.py`` from ``benchmarks/results/layer-*.json``.

After ``python -m jax_b12x bench layer --json benchmarks/results/layer-...-h200-DATE.json`` on an
H200. Of two reports of one case, the one whose name comes later counts.
"""

from __future__ import annotations

import pathlib

from jax_b12x.bench import layer
from jax_b12x.bench.measurement import Report

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "jax_b12x" / "moe" / "overlap_measured.py"
BEGIN = "MEASURED: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = {\n"
END = "}\n\n_MEASURED_ON"


def main() -> None:
    """Replaces the table; what else is in the module stays."""
    table: dict[object, dict[int, object]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("layer-*.json")):
        for case, rows in layer.overlap_times(Report.from_json(path.read_text())).items():
            table.setdefault(case, {}).update(rows)
    lines = []
    for case, rows in table.items():
        # A trailing comma after the last field: the formatter then puts each on its own line.
        lines.append(f"    {str(case)[:-1]},): {{\n")
        lines += [f"        {tokens}: {times},\n" for tokens, times in sorted(rows.items())]
        lines.append("    },\n")
    before, _, rest = TABLE.read_text().partition(BEGIN)
    TABLE.write_text(before + BEGIN + "".join(lines) + END + rest.partition(END)[2])
    print(f"{len(table)} cases; run `ruff format {TABLE.relative_to(ROOT)}`")


if __name__ == "__main__":
    main()
