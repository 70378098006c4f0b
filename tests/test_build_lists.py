"""One list of sources serves CMake and Bazel, and nothing is left out of it."""

import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "cmake" / "sources.cmake"


@pytest.fixture(scope="module")
def bazel_lists():
    """The lists as Bazel reads them."""
    spec = importlib.util.spec_from_file_location(
        "bazel_environment", ROOT / "bazel" / "environment.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.sources(LIST.read_text())


def test_bazel_reads_the_lists_as_cmake_does(bazel_lists, tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake on PATH")
    script = tmp_path / "print.cmake"
    script.write_text(
        f'include("{LIST}")\n'
        + "".join(f'message("{name}=${{{name}}}")\n' for name in sorted(bazel_lists))
    )
    told = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True).stderr
    expected = {}
    for line in told.splitlines():
        name, _, values = line.partition("=")
        expected[name] = values.split(";") if values else []
    assert bazel_lists == expected


def test_bazel_uses_every_list(bazel_lists):
    build = (ROOT / "BUILD").read_text()
    unused = [name for name in bazel_lists if len(re.findall(rf"\b{name}\b", build)) < 2]
    assert not unused, "loaded and used in BUILD"


def test_every_source_is_in_a_list_once_and_exists(bazel_lists):
    listed = sorted(
        file for values in bazel_lists.values() for file in values if file.endswith((".cc", ".cu"))
    )
    present = sorted(
        str(path.relative_to(ROOT))
        for folder in ("ffi", "cuda")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".cu")
    )
    assert listed == present
