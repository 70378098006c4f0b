"""Runs pytest on the files that the command line names, on the package that Bazel built."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path.cwd()  # Bazel starts a test in the runfiles of the workspace


def main() -> int:
    """Runs the tests; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # for the programs that the tests start
    import jax_b12x

    if not pathlib.Path(jax_b12x.__file__).is_relative_to(ROOT):
        raise SystemExit(f"{jax_b12x.__file__} would be tested, which is not below {ROOT}")
    arguments = [*sys.argv[1:], f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    report = os.environ.get("XML_OUTPUT_FILE")
    if report:
        arguments.append(f"--junitxml={report}")
    status = pytest.main(arguments)
    # A file whose tests all need a GPU is deselected as a whole.
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


if __name__ == "__main__":
    sys.exit(main())
