"""Mixture-of-experts decode kernels and one-shot collectives for JAX, as XLA FFI custom calls.

``from jax_b12x import comm, moe, quant``: each subpackage is imported when it is asked for, and
importing the package itself imports nothing else, JAX included.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_b12x import comm, moe, quant, workspace
    from jax_b12x.lanes import lane

__version__ = "0.1.0"
__all__ = ["__version__", "comm", "lane", "moe", "quant", "register", "workspace"]


def register() -> None:
    """Registers the custom calls with JAX and starts its backend.

    The ops do it themselves when they are traced. Only a program that was exported or compiled
    elsewhere, and is merely run here, needs the call.

    Raises:
      NativeError: the extension is not built.
    """
    from jax_b12x import _native

    _native.ensure_registered()


def __getattr__(name: str) -> Any:
    if name == "lane":
        return importlib.import_module(f"{__name__}.lanes").lane
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
