"""Ops without a derivative: what differentiating one says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def without_derivative(name: str, advice: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` so that differentiating it is an error.

    Args:
      name: what the error calls it.
      advice: what to differentiate instead.
      function: of arrays, in any pytrees.
    """
    call = jax.custom_jvp(function)

    @call.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"{name} is inference-only and has no derivative; {advice}, or put "
            "jax.lax.stop_gradient around its arguments"
        )

    return call


def guard(name: str, advice: str, arguments: T) -> T:
    """Returns the arrays that a call is given, so that differentiating them names the call.

    For calls of several ops, whose errors would name the first of them. Nothing is computed.

    Args:
      name: what the error calls it.
      advice: what to differentiate instead.
      arguments: all that the call computes with, a pytree of arrays.
    """
    guarded: T = without_derivative(name, advice, lambda arguments: arguments)(arguments)
    return guarded
