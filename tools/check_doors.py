"""Checks the rules between the parts of the code that no compiler or linter knows.

- ``cuda/`` knows nothing of XLA; ``ffi/runtime/`` neither.
- Python reads the environment in ``jax_b12x/config.py`` only, and C++ never does.
- Imports go one way: ``flax -> moe -> {comm, quant} -> _native``; nothing imports ``cli`` or
  ``bench``.

Prints each breach as ``file:line: what`` and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_b12x"
CXX_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

# Which rooms of the package a room may import, itself aside. `arguments`, `config`, `capability`,
# `consoles`, `lanes` and `_native` are open to all; the rooms that are not named here (cli, bench)
# may import every other.
DOORS = {
    "quant": set(),
    "comm": {"quant"},
    "workspace": {"comm"},
    "workspace_call": {"workspace"},
    "moe": {"quant", "comm", "workspace", "workspace_call"},
    "flax": {"quant", "comm", "workspace", "moe"},
    "arguments": set(),
    "capability": set(),
    "config": set(),
    "consoles": set(),
    "lanes": set(),
    "_native": set(),
}
OPEN_TO_ALL = {
    "_b12x",
    "_b12x_cuda",
    "_native",
    "arguments",
    "capability",
    "config",
    "consoles",
    "lanes",
}


def cxx_files(*folders: str) -> Iterator[pathlib.Path]:
    """Yields the C++ and CUDA files below ``folders``."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CXX_SUFFIXES:
                yield path


def matches(path: pathlib.Path, pattern: str, message: str) -> Iterator[str]:
    """Yields a breach for each line of ``path`` in which ``pattern`` is found."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.search(pattern, line):
            yield f"{path.relative_to(ROOT)}:{number}: {message}"


def check_cxx() -> Iterator[str]:
    """Yields the breaches in C++ and CUDA sources."""
    for path in cxx_files("cuda", "ffi/runtime"):
        yield from matches(
            path, r"#\s*include\s*[<\"]xla/|\bxla::", "XLA is not known here; handlers are in ffi/"
        )
    for path in cxx_files("cuda", "ffi"):
        yield from matches(
            path, r"\bgetenv\s*\(", "the environment is read in jax_b12x/config.py only"
        )


def imported_rooms(tree: ast.AST, path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (line, room) for each room of the package that a module imports."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    (*package[: len(package) - node.level + 1], *base.split("."))
                ).strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "jax_b12x" and len(parts) > 1:
                yield node.lineno, parts[1]


def check_python() -> Iterator[str]:
    """Yields the breaches in the Python package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room != "config":
            yield from matches(
                path,
                r"\bos\.(environ|getenv|putenv)\b|from os import .*\b(environ|getenv)\b",
                "the environment is read in jax_b12x/config.py only",
            )
        if room not in DOORS:
            continue
        tree = ast.parse(path.read_text(), str(path))
        allowed = DOORS[room] | OPEN_TO_ALL | {room, "__version__"}
        for number, imported in imported_rooms(tree, path):
            if imported not in allowed:
                yield f"jax_b12x/{relative}:{number}: {room} may not import {imported}"


def main() -> int:
    """Prints the breaches; returns the exit status."""
    breaches = [*check_cxx(), *check_python()]
    print("\n".join(breaches) if breaches else "no breach")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
