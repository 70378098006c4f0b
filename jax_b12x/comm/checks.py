"""Checks of arguments where they come in: each refusal names the argument and what would be right.

Python and JAX would take many of these values, or refuse them far from the call.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x import config

# What the runtime counts bytes in.
_MOST = 2**63 - 1


def integer(name: str, value: Any, least: int | None = None, unit: str = "") -> int:
    """Returns a whole number.

    Args:
      name: the argument's name.
      value: what the caller gave.
      least: the smallest that is allowed, if there is one.
      unit: of what, such as ``"bytes"``.

    Raises:
      TypeError: it is no whole number.
      ValueError: it is smaller, or does not fit into 64 bits.
    """
    wanted = f"{name} must be a whole number{f' of {unit}' if unit else ''}"
    if least is not None:
        wanted = f"{wanted}, {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{wanted}, not {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{wanted}, not {value!r}")
    if abs(number) > _MOST or (least is not None and number < least):
        raise ValueError(f"{wanted}, not {value!r}")
    return number


def size(name: str, value: Any, least: int) -> int:
    """Returns a size in bytes, given as a number or a text such as ``"512KB"``.

    Raises:
      TypeError: it is neither.
      ValueError: it has another form, or it is smaller than ``least``.
    """
    if isinstance(value, str):
        try:
            value = config.parse_size(value)
        except ValueError:
            raise ValueError(
                f"{name}={value!r} is not understood; allowed: bytes, or a size such as '512KB'"
            ) from None
    return integer(name, value, least, "bytes")


def number(name: str, value: Any) -> float:
    """Returns a finite number that is known when the program is traced.

    Raises:
      TypeError: it is none.
      ValueError: it is infinite or NaN.
    """
    # A bool is no number here, and a text that looks like one is not either.
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        result = float(value)
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(f"{name} must be a number that tracing knows, not {value!r}") from None
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, not {value!r}")
    return result


def array(name: str, value: Any) -> jax.Array:
    """Returns an array; a Python number becomes fp32 or int32, whatever ``jax_enable_x64`` says.

    Raises:
      TypeError: it cannot be one.
    """
    try:
        if value is None:  # which JAX refuses in other words from version to version
            raise TypeError
        result = jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array, not a {type(value).__name__}") from None
    if result.weak_type and result.dtype == jnp.float64:
        return result.astype(jnp.float32)
    return result
