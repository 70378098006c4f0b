"""Describes the local environment to Bazel; run by ``bazel/environment.bzl``.

Usage: ``python environment.py FOLDER SOURCES_CMAKE TOOLS_FOLDER CUDA``. Writes ``BUILD``,
``settings.bzl`` and a virtual environment for the tests into ``FOLDER``, and prints as JSON which
symbolic links to make there.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import platform
import re
import site
import subprocess
import sys
import sysconfig

BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python_headers",
    hdrs = glob(["python_include/**/*.h"]),
    includes = ["python_include"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla_include/xla/**/*.h"]),
    includes = ["xla_include"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = ["-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    includes = ["nanobind/include"],
    local_defines = ["NB_BUILD"],
    textual_hdrs = glob([
        "nanobind/src/*.cpp",
        "nanobind/src/*.h",
        "nanobind/ext/robin_map/include/**/*.h",
    ]),
    deps = [":python_headers", ":robin_map"],
    alwayslink = True,
)

cc_library(
    name = "robin_map",
    hdrs = glob(["nanobind/ext/robin_map/include/**/*.h"]),
    includes = ["nanobind/ext/robin_map/include"],
)

py_runtime(
    name = "python",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "python_pair",
    py3_runtime = ":python",
)

toolchain(
    name = "python_toolchain",
    toolchain = ":python_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

CUDA_BUILD = """
cc_library(
    name = "cudart",
    srcs = ["cuda_lib/libcudart_static.a"],
    hdrs = glob(["cuda_include/**/*"]),
    includes = ["cuda_include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
)
"""


def sources(text: str) -> dict[str, list[str]]:
    """Returns the lists that a CMake file of plain ``set(NAME value...)`` commands defines."""
    text = re.sub(r"#.*", "", text)
    lists = {name: values.split() for name, values in re.findall(r"set\(\s*(\w+)([^)]*)\)", text)}
    rest = re.sub(r"set\(\s*\w+[^)]*\)", "", text).strip()
    if rest:
        raise SystemExit(f"cmake/sources.cmake may hold set(NAME value...) only, and has {rest!r}")
    return lists


def package_folder(name: str) -> pathlib.Path:
    """Returns where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{sys.executable} has no {name}; name another Python in B12X_PYTHON")
    return pathlib.Path(spec.origin).parent


def make_test_python(folder: pathlib.Path) -> pathlib.Path:
    """Makes an interpreter that sees the packages of this one, but no editable install.

    The hook of an editable ``jax_b12x`` would put that one before what Bazel built.
    """
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    purelib = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # Entries of a .pth file are added as they are: .pth files in those folders are not read.
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    folders = dict.fromkeys([*seen, *site.getsitepackages()])
    pathlib.Path(purelib, "environment.pth").write_text("\n".join(folders) + "\n")
    return python


def main() -> None:
    """Writes the files and prints the links."""
    folder, cmake_list, tools, cuda = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    sys.path.append(tools)
    import find_nvcc

    settings: dict[str, object] = dict(sources(pathlib.Path(cmake_list).read_text()))
    settings["X86_64"] = platform.machine() in ("x86_64", "AMD64")
    build = BUILD.format(interpreter=make_test_python(folder))
    links = {
        "python_include": sysconfig.get_path("include"),
        "xla_include": str(package_folder("jaxlib") / "include"),
        "nanobind": str(package_folder("nanobind")),
    }
    settings["NVCC"] = ""
    if cuda.lower() not in ("off", "0", "false"):
        source = "auto" if cuda.lower() in ("on", "1", "true") else cuda.lower()
        try:
            toolkit = find_nvcc.find(source)
        except find_nvcc.NoCompilerError as error:
            if source != "auto":
                raise SystemExit(f"B12X_CUDA is {source}: {error}") from None
        else:
            settings["NVCC"] = toolkit.nvcc
            links["cuda_include"] = toolkit.include
            links["cuda_lib/libcudart_static.a"] = toolkit.cudart_static
            build += CUDA_BUILD
    (folder / "BUILD").write_text(build)
    (folder / "settings.bzl").write_text(
        '"""Written by bazel/environment.py."""\n\n'
        + "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    )
    print(json.dumps(links))


if __name__ == "__main__":
    main()
