"""Finds the CUDA compiler that the CUDA half is built with: the one place that knows where to look.

CMake, Bazel, the build backend and the Makefile ask here. The sources of a compiler are

- ``system``: ``$CUDACXX`` and no other when it is set; else ``nvcc`` on ``PATH``, ``$CUDA_HOME``,
  ``$CUDA_PATH``, ``/usr/local/cuda``, in that order;
- ``pypi``: the packages nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime and
  nvidia-cuda-cccl in the environment of this interpreter, all of one CUDA release;
- ``auto``: the first, else the second.

As a program it prints the toolkit as JSON, or says on stderr where it looked and exits with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal, get_args

Source = Literal["auto", "system", "pypi"]

# CUDA 12.8 brought the FP4 type of cuda_fp4.h.
OLDEST = (12, 8)

DEFAULT_HOME = pathlib.Path("/usr/local/cuda")

# Packages whose release is CUDA's own. nvidia-cuda-cccl is numbered by itself since 13.3.
PYPI_OF_ONE_RELEASE = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
)
PYPI_PACKAGES = (*PYPI_OF_ONE_RELEASE, "nvidia-cuda-cccl")


class NoCompilerError(Exception):
    """There is no usable compiler; the message says where was looked."""


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler and what a build needs beside it.

    Attributes:
      source: ``"system"`` or ``"pypi"``.
      nvcc: the compiler.
      version: its release, such as ``"13.0.88"``.
      include: the folder of ``cuda_runtime_api.h``.
      cudart_static: the static CUDA runtime library.
    """

    source: str
    nvcc: str
    version: str
    include: str
    cudart_static: str


def find(source: Source = "auto") -> Toolkit:
    """Returns the compiler to build with.

    Args:
      source: where to look; a source that is named is the only one that is searched.

    Raises:
      NoCompilerError: there is none; the message lists what was tried.
    """
    tried: list[str] = []
    if source in ("auto", "system"):
        for origin, nvcc in _system_candidates():
            try:
                return _inspect("system", nvcc)
            except NoCompilerError as error:
                tried.append(f"{origin}: {error}")
        if not tried:
            tried.append(f"no $CUDACXX, no nvcc on PATH, no $CUDA_HOME, no {DEFAULT_HOME}/bin/nvcc")
    if source in ("auto", "pypi"):
        try:
            return _inspect("pypi", _pypi_nvcc())
        except NoCompilerError as error:
            tried.append(f"packages of {sys.executable}: {error}")
    raise NoCompilerError("; ".join(tried))


def _system_candidates() -> Iterator[tuple[str, pathlib.Path]]:
    named = os.environ.get("CUDACXX")
    if named:
        yield "$CUDACXX", pathlib.Path(shutil.which(named) or named)
        return
    on_path = shutil.which("nvcc")
    if on_path:
        yield "nvcc on PATH", pathlib.Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            yield f"${variable}", pathlib.Path(home, "bin", "nvcc")
    default = DEFAULT_HOME / "bin" / "nvcc"
    if default.exists():
        yield str(DEFAULT_HOME), default


def _pypi_nvcc() -> pathlib.Path:
    versions: dict[str, str | None] = {}
    for package in PYPI_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        raise NoCompilerError(f"{', '.join(missing)} not installed")
    releases = {
        package: ".".join(str(versions[package]).split(".")[:2]) for package in PYPI_OF_ONE_RELEASE
    }
    if len(set(releases.values())) > 1:
        found = ", ".join(f"{package} {release}" for package, release in releases.items())
        raise NoCompilerError(f"they must be of one CUDA release, and they are {found}")
    spec = importlib.util.find_spec("nvidia")
    major = releases["nvidia-cuda-nvcc"].split(".")[0]
    for folder in spec.submodule_search_locations or () if spec else ():
        nvcc = pathlib.Path(folder, f"cu{major}", "bin", "nvcc")
        if nvcc.exists():
            return nvcc
    raise NoCompilerError(f"nvidia-cuda-nvcc is installed, but nvidia/cu{major}/bin/nvcc is not")


def _inspect(source: str, nvcc: pathlib.Path) -> Toolkit:
    """Asks ``nvcc`` what it is and where its toolkit lies (it may be a wrapper script)."""
    told = _run(nvcc, "--version")
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", told)
    if match is None:
        raise NoCompilerError(f"{nvcc} does not say its version")
    if (int(match[1]), int(match[2])) < OLDEST:
        raise NoCompilerError(f"{nvcc} is {match[3]}, older than {OLDEST[0]}.{OLDEST[1]}")
    top = re.search(r"^#\$ TOP=(.*)$", _run(nvcc, "--dryrun", "-x", "cu", "-E", os.devnull), re.M)
    if top is None:
        raise NoCompilerError(f"{nvcc} does not say where its toolkit is")
    root = pathlib.Path(top[1].strip()).resolve()
    targets = sorted(root.glob(f"targets/{os.uname().machine}-linux"))
    include = _first([folder / "include" for folder in (root, *targets)], "cuda_runtime_api.h")
    libraries = [folder / lib for folder in (root, *targets) for lib in ("lib64", "lib")]
    cudart = _first(libraries, "libcudart_static.a")
    for folder, what in ((include, "cuda_runtime_api.h"), (cudart, "libcudart_static.a")):
        if folder is None:
            raise NoCompilerError(f"there is no {what} under {root}")
    return Toolkit(source, str(nvcc), match[3], str(include), f"{cudart}/libcudart_static.a")


def _first(folders: list[pathlib.Path], name: str) -> pathlib.Path | None:
    return next((folder for folder in folders if (folder / name).exists()), None)


def _run(nvcc: pathlib.Path, *arguments: str) -> str:
    try:
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"{nvcc} does not run: {error}") from None
    if done.returncode != 0:
        raise NoCompilerError(f"{nvcc} {arguments[0]} failed: {done.stderr.strip()[:200]}")
    return done.stdout + done.stderr


def main() -> int:
    """Prints the toolkit; returns the exit status."""
    parser = argparse.ArgumentParser(description="Finds the CUDA compiler.")
    parser.add_argument("source", nargs="?", default="auto", choices=get_args(Source))
    try:
        toolkit = find(parser.parse_args().source)
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(toolkit), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
