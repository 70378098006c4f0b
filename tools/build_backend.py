"""The build backend: scikit-build-core's, which brings the CUDA compiler along where there is none.

``pip install .`` builds in an environment of its own, which holds the build requirements alone.
When the machine has no CUDA toolkit, the compiler packages of the dependency group
``cuda-compiler`` are asked for as well, so that the CUDA half is in every wheel whatever the
machine. The CMake variable ``B12X_CUDA`` says otherwise::

    pip install . --config-settings=cmake.define.B12X_CUDA=off     # CPU only, no CUDA half
    pip install . --config-settings=cmake.define.B12X_CUDA=pypi    # PyPI's compiler, always
    pip install . --config-settings=cmake.define.B12X_CUDA=system  # the machine's, or an error

Without build isolation nothing is brought: what the environment holds is what is used.
"""

from __future__ import annotations

import os
import pathlib
import tomllib
from collections.abc import Mapping

import find_nvcc
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import get_requires_for_build_editable as _requires_for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_for_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = pathlib.Path(__file__).resolve().parent.parent
Settings = Mapping[str, list[str] | str]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Returns what is needed to build a wheel, beside the static build requirements."""
    return [*_requires_for_wheel(config_settings), *compiler_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Returns what is needed for an editable install, beside the static build requirements."""
    return [*_requires_for_editable(config_settings), *compiler_requirements(config_settings)]


def compiler_requirements(config_settings: Settings | None) -> list[str]:
    """Returns the compiler packages, or nothing where they are not wanted."""
    choice = cuda_choice(config_settings)
    if choice == "pypi" or (choice == "auto" and not _system_has_nvcc()):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        return list(project["dependency-groups"]["cuda-compiler"])
    return []


def cuda_choice(config_settings: Settings | None) -> str:
    """Returns ``B12X_CUDA`` as the build will see it: auto, system, pypi or off.

    Raises:
      ValueError: it is another word.
    """
    defined: dict[str, str] = {}
    for definition in os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";"):
        name, _, value = definition.partition("=")
        defined[name] = value
    for key, value in (config_settings or {}).items():
        if key.removeprefix("skbuild.") == "cmake.define.B12X_CUDA":
            defined["B12X_CUDA"] = value if isinstance(value, str) else value[-1]
    choice = defined.get("B12X_CUDA", "auto").lower()
    choice = {"on": "auto", "true": "auto", "1": "auto", "false": "off", "0": "off"}.get(
        choice, choice
    )
    if choice not in ("auto", "system", "pypi", "off"):
        raise ValueError(f"B12X_CUDA is {choice!r}; it must be auto, system, pypi or off")
    return choice


def _system_has_nvcc() -> bool:
    try:
        find_nvcc.find("system")
    except find_nvcc.NoCompilerError:
        return False
    return True
