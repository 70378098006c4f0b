"""Prints requirements from pyproject.toml, one a line, for ``pip install -r``.

Groups: ``build`` (to build without isolation), ``runtime``, ``cmake`` (CMake and Ninja, where the
machine has none that are new enough), or the name of an optional dependency or dependency group.
"""

from __future__ import annotations

import argparse
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def requirements(group: str) -> list[str]:
    """Returns the requirements of one group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if group == "build":
        # The headers come from the jaxlib of the run-time requirements: here, what is built runs
        # where it was built.
        requires = project["build-system"]["requires"]
        return [line for line in requires if not line.startswith("jaxlib")]
    if group == "runtime":
        return list(project["project"]["dependencies"])
    if group == "cmake":
        # The build backend knows best: it asks for the programs that it does not find.
        from scikit_build_core.build import get_requires_for_build_editable

        return get_requires_for_build_editable({})
    groups = project["project"]["optional-dependencies"] | project["dependency-groups"]
    return list(groups[group])


def main() -> None:
    """Prints the groups that the command line names, each requirement once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--jax", default="", help="pin jax and jaxlib to this version")
    args = parser.parse_args()
    lines = [line for group in args.groups for line in requirements(group)]
    if args.jax:
        lines += [f"jax=={args.jax}", f"jaxlib=={args.jax}"]
    for line in dict.fromkeys(lines):
        print(line)


if __name__ == "__main__":
    main()
