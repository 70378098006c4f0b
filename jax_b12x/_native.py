"""Loads the extensions and registers their FFI targets and types with JAX: the one place.

Importing the package loads nothing and starts no backend. An op calls :func:`ensure_registered`
when it is traced; a program that was lowered elsewhere and is only run here (``jax.export``) needs
the call too, which is why the package exposes it as ``jax_b12x.register()``.
"""

from __future__ import annotations

import functools
import importlib
import threading
from importlib import metadata
from types import ModuleType

import jax


class NativeError(ImportError):
    """The extension is missing or does not fit the JAX that is installed."""


_lock = threading.Lock()


def host() -> ModuleType:
    """Returns the host extension.

    Raises:
      NativeError: it is not built.
    """
    try:
        return importlib.import_module("jax_b12x._b12x")
    except ImportError as error:
        raise NativeError(
            f"the jax_b12x extension cannot be loaded ({error}); build it with `pip install .` in "
            "the source tree, which needs a C++17 compiler"
        ) from error


def cuda() -> ModuleType | None:
    """Returns the CUDA extension, or ``None`` where it was not built."""
    try:
        return importlib.import_module("jax_b12x._b12x_cuda")
    except ModuleNotFoundError:
        return None


def ensure_registered() -> None:
    """Registers all targets and types, once.

    It starts JAX's backend: on CPU, types can only be registered before the targets that use them
    once the backend is up.
    """
    with _lock:
        _register_all()


@functools.cache
def _register_all() -> None:
    jax.devices()
    _register(host(), "cpu")
    cuda_extension = cuda()
    if cuda_extension is not None:
        _register(cuda_extension, "CUDA")


def _register(extension: ModuleType, platform: str) -> None:
    targets, types = extension.ffi_registry()
    try:
        for name, registration in types.items():
            jax.ffi.register_ffi_type(name, registration, platform=platform)
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform)
    except jax.errors.JaxRuntimeError as error:
        if "API version" not in str(error):
            raise
        built = ".".join(map(str, extension.XLA_FFI_API_VERSION))
        raise NativeError(
            f"{extension.__name__} was built for XLA's FFI API {built}, which is newer than "
            f"that of jaxlib {metadata.version('jaxlib')}: build it again in this environment "
            f"({error})"
        ) from error
