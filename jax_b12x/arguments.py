"""Refusals of arguments of the wrong kind, where they come in: each names the argument.

Without them Python and JAX would stumble over such a value far from the call.
"""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def what(value: Any) -> str:
    """Returns what a value is, for a message: ``a tuple``, or ``'tp', a str``."""
    name = type(value).__name__
    kind = f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
    return f"{value!r}, {kind}" if isinstance(value, str) else kind


def check_array(name: str, value: Any) -> None:
    """Refuses what is not an array.

    Raises:
      TypeError: names the argument and its type.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name} is {what(value)}; it must be an array")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuses what is not of a kind; ``wanted`` says what it must be, and how it is made.

    Raises:
      TypeError: names the argument and its type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {what(value)}; it must be {wanted}")


def as_array(name: str, value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns what may be an array or a number as an array, of ``dtype`` if that is given.

    Raises:
      TypeError: it is neither; names the argument and its type.
    """
    try:
        if value is not None and not isinstance(value, str):
            return jnp.asarray(value, dtype)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} is {what(value)}; it must be an array or a number") from None


def dtype_name(name: str, value: Any) -> str:
    """Returns the name of a dtype.

    Raises:
      TypeError: it is no dtype. ``None``, which NumPy would take for float64, is none either.
    """
    try:
        if value is not None:
            return str(jnp.dtype(value).name)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}; it must be a dtype, such as jnp.bfloat16") from None


def check_integer(name: str, value: Any) -> None:
    """Refuses what is no integer.

    Raises:
      ValueError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} is {value!r}; it must be an integer: shapes are static")


def number(name: str, value: Any) -> float:
    """Returns a number that is known when the program is traced.

    Raises:
      TypeError: it is none; names the argument.
    """
    # A text that looks like a number is none.
    if not isinstance(value, (bool, str, bytes)):
        try:
            return float(value)
        except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
            pass
    raise TypeError(f"{name} is {value!r}; it must be a number, known when tracing") from None
