"""The JAX primitive of a call that may keep something on the device: an FFI call with a lease.

It lowers to the FFI call with what the runtime needs to find its workspace, as values: the pool's
name, the lane, the program's name and the call site's number in it, the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jax_b12x import workspace

# bind(*operands, target=..., results=((shape, dtype), ...), need=..., place=..., attributes=...)
workspace_call_p = jax.extend.core.Primitive("b12x_workspace_call")


@dataclasses.dataclass(frozen=True)
class Need:
    """What a call keeps on each device from one execution to the next.

    Attributes:
      bytes: persistent memory, zero at first.
      streams: streams of its own, 0 or 1.
    """

    bytes: int = 0
    streams: int = 0


def call(
    target: str,
    results: Sequence[tuple[tuple[int, ...], Any]],
    operands: Sequence[jax.Array],
    attributes: Mapping[str, Any],
    *,
    need: Need,
    place: workspace.Place,
) -> list[jax.Array]:
    """Calls an FFI target whose handler takes the lease of a workspace.

    Args:
      target: its name.
      results: shape and dtype of each result.
      operands: its operands.
      attributes: its own attributes, values only: numbers, strings and mappings of these.
      need: what it keeps.
      place: the pool and lane that it belongs to, from :func:`workspace.current`.

    Returns:
      The results.
    """
    arrays: list[jax.Array] = workspace_call_p.bind(
        *operands,
        target=target,
        results=tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in results),
        need=need,
        place=place,
        attributes=_frozen(attributes),
    )
    return arrays


def _frozen(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, _frozen(value) if isinstance(value, Mapping) else value)
        for name, value in sorted(attributes.items())
    )


def _thawed(attributes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {
        name: _thawed(value) if isinstance(value, tuple) else value for name, value in attributes
    }


def _types(*operands: Any, results: tuple[tuple[tuple[int, ...], Any], ...], **_: Any) -> list[Any]:
    varying = frozenset().union(*(operand.mat.varying for operand in operands))
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    types = []
    for shape, dtype in results:
        result = jax.core.ShapedArray(shape, dtype)
        types.append(
            result.update(sharding=sharding, manual_axis_type=result.mat.update(varying=varying))
        )
    return types


def _lower(
    ctx: Any,
    *operands: Any,
    target: str,
    results: Any,
    need: Need,
    place: workspace.Place,
    attributes: tuple[tuple[str, Any], ...],
) -> Any:
    del results
    module = ctx.module_context.module
    keeps = need != Need()
    return jax.ffi.ffi_lowering(target)(
        ctx,
        *operands,
        op=target.removeprefix("b12x_"),
        program=str(module.operation.attributes["sym_name"]).strip('"') if keeps else "",
        # Counts the call sites of a module, together with its channels.
        site=np.int64(ctx.module_context.new_channel() if keeps else 0),
        workspace_pool=place.pool,
        workspace_lane=place.lane,
        workspace_bytes=np.int64(need.bytes),
        workspace_streams=np.int64(need.streams),
        **_thawed(attributes),
    )


@functools.lru_cache(maxsize=1024)
def _jitted(parameters: tuple[tuple[str, Any], ...]) -> Any:
    keywords = dict(parameters)

    def program(*operands: Any) -> Any:
        return workspace_call_p.bind(*operands, **keywords)

    program.__name__ = keywords["target"]
    return jax.jit(program)


def _run_alone(*operands: Any, **parameters: Any) -> Any:
    """Runs a call outside of ``jit``, as a program of its own."""
    return _jitted(tuple(sorted(parameters.items())))(*operands)


workspace_call_p.multiple_results = True
workspace_call_p.def_impl(_run_alone)
workspace_call_p.def_abstract_eval(_types)
# Every call site is lowered for itself, so that each has its number.
mlir.register_lowering(workspace_call_p, _lower, cacheable=False)
