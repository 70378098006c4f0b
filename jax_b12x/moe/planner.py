"""The rules behind :func:`jax_b12x.moe.plan.plan`: pure, from static facts to a decision."""

from __future__ import annotations

import dataclasses
import numbers
from types import ModuleType
from typing import TYPE_CHECKING

from jax_b12x.moe import geometry_cpu, geometry_cuda
from jax_b12x.moe.geometry import BLOCK, Geometry, Request
from jax_b12x.moe.recipe import Activation

if TYPE_CHECKING:
    from jax_b12x.moe.plan import Implementation, Overlap

__all__ = ["Decision", "Request", "decide", "overlap"]

DTYPES = ("float32", "bfloat16", "float16")
IMPLEMENTATIONS = ("fused", "split", "dynamic", "reference")
# A resident grid of at most this many tokens lets auxiliary work finish before it is submitted.
MAX_PRE_RESIDENT_TOKENS = 7
_NO_SAY = (
    "B12X_NVFP4_SPLIT_DECODE or split_decode, which is set, is about decode launches alone and has "
    "no say here"
)
# A grid barrier's words have memory of this size to themselves.
_BARRIER_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Decision:
    """The path, how it is launched, and why, a sentence each."""

    implementation: Implementation
    geometry: Geometry
    reasons: tuple[str, ...]


def overlap(recipe: str, implementation: str, num_tokens: int) -> Overlap:
    """Returns what auxiliary-stream work may do beside a launch.

    ``recipe`` may be one that has no kernels yet: the hybrid ``nvfp4_nf3`` tolerates nothing on any
    path, and a recipe that this table does not know is treated the same.
    """
    if recipe not in ("nvfp4", "w4a16"):
        return "none"
    if implementation == "split":
        return "concurrent"
    if implementation == "fused" and num_tokens <= MAX_PRE_RESIDENT_TOKENS:
        return "pre_resident"
    return "none"


def workspace_bytes(implementation: str) -> int:
    """Returns what a launch keeps on the device from run to run, in bytes."""
    return _BARRIER_BYTES if implementation == "fused" else 0


def decide(
    request: Request, implementation: Implementation | None, split_decode: bool | None
) -> Decision:
    """Chooses the path for ``request``.

    Args:
      request: the static facts; checked here.
      implementation: the caller's forced path.
      split_decode: the forced launch of ``nvfp4`` decode: split (true) or fused (false).

    Raises:
      ValueError: a fact is out of range, or a forced path cannot run.
    """
    check(request)
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation is {implementation!r}; it must be one of "
                f"{', '.join(map(repr, IMPLEMENTATIONS))} or None"
            )
        reasons = ("the caller forces it", *_of_many_tokens(request, implementation))
        return _settle(request, implementation, reasons, forced_by="implementation")
    if request.num_tokens > _platform(request).MAX_DECODE_TOKENS:
        reason = (
            f"{request.num_tokens} tokens are more than the "
            f"{_platform(request).MAX_DECODE_TOKENS} that decode launches take"
        )
        forced_in_vain = request.recipe.name == "nvfp4" and split_decode is not None
        reasons = (reason, _NO_SAY) if forced_in_vain else (reason,)
        return _settle(request, "dynamic", reasons)
    if request.recipe.name == "nvfp4" and split_decode is not None:
        forced: Implementation = "split" if split_decode else "fused"
        why = f"nvfp4 decode is forced to be {forced} (B12X_NVFP4_SPLIT_DECODE or split_decode)"
        return _settle(request, forced, (why,), forced_by="split_decode")
    obstacle = _platform(request).unsupported(request, "fused")
    if obstacle is not None:
        return _settle(request, "split", (f"not fused: {obstacle}",))
    return _settle(
        request, "fused", ("decode in one launch: the intermediate stays close and is read once",)
    )


def _of_many_tokens(request: Request, implementation: str) -> tuple[str, ...]:
    """Returns what to know where a decode path is forced for more tokens than decode has."""
    most = _platform(request).MAX_DECODE_TOKENS
    if request.num_tokens <= most or implementation not in ("fused", "split"):
        return ()
    several = (
        f": {implementation} launches of {most} tokens follow one another, and each reads the "
        "experts that it touches"
        if _platform(request).SPLITS_DECODE
        else ""
    )
    return (
        f"{request.num_tokens} tokens are more than the {most} that decode launches take, and "
        f"dynamic is the path for them{several}",
    )


def check(request: Request) -> None:
    """Refuses facts that no path can run.

    Raises:
      ValueError: names the argument, its value and what it must be.
    """
    for name in ("num_tokens", "hidden", "intermediate", "num_experts", "top_k"):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"{name} is {value!r}; it must be an integer: shapes are static")
    if not isinstance(request.activation, Activation):
        raise ValueError(
            f"activation is {request.activation!r}; it must be an Activation, such as moe.SILU"
        )
    formats = request.recipe.weight_formats
    if request.weight_format not in formats:
        raise ValueError(
            f"weight_format is {request.weight_format!r}; recipe {request.recipe.name!r} takes "
            f"{' or '.join(map(repr, formats))}"
        )
    if request.dtype not in DTYPES:
        raise ValueError(f"dtype of x is {request.dtype}; it must be {', '.join(DTYPES)}")
    if request.num_tokens < 0:
        raise ValueError(f"num_tokens is {request.num_tokens}; it must be 0 or more")
    if request.num_experts < 1:
        raise ValueError(f"num_experts is {request.num_experts}; it must be 1 or more")
    block = BLOCK[request.weight_format]
    for name in ("hidden", "intermediate"):
        size = getattr(request, name)
        if size < block or size % block:
            raise ValueError(
                f"{name} is {size}; it must be a positive multiple of {block}, the block of "
                f"{request.weight_format}"
            )
    if not 1 <= request.top_k <= request.num_experts:
        raise ValueError(
            f"top_k is {request.top_k}; it must be between 1 and num_experts "
            f"({request.num_experts})"
        )


def _platform(request: Request) -> ModuleType:
    return geometry_cpu if request.device.platform == "cpu" else geometry_cuda


def _settle(
    request: Request,
    implementation: Implementation,
    reasons: tuple[str, ...],
    forced_by: str | None = None,
) -> Decision:
    """Returns the decision for a path, or says why the path cannot run."""
    if implementation == "reference":
        return Decision(implementation, Geometry(), (*reasons, "plain jnp: XLA schedules it"))
    platform = _platform(request)
    obstacle = platform.unsupported(request, implementation)
    if obstacle is not None:
        tokens = "1 token" if request.num_tokens == 1 else f"{request.num_tokens} tokens"
        what = f"{request.recipe.name} with {tokens} on {request.device}"
        if forced_by is None:
            raise ValueError(f"there is no kernel for {what}: {obstacle}")
        raise ValueError(
            f"{implementation!r} cannot run {what}: {obstacle}; it was forced by {forced_by}"
        )
    geometry: Geometry = platform.geometry(request, implementation)
    reasons = (*reasons, *geometry.reasons, _overlap_reason(request, implementation))
    return Decision(implementation, geometry, reasons)


def _overlap_reason(request: Request, implementation: str) -> str:
    allowed = overlap(request.recipe.name, implementation, request.num_tokens)
    if allowed == "concurrent":
        return "overlap is concurrent: no launch waits for a whole grid to be resident"
    if allowed == "pre_resident":
        return (
            "overlap is pre_resident: the grid must be resident as a whole, so auxiliary work is "
            "joined before it is submitted"
        )
    if implementation == "fused":
        return (
            f"overlap is none: a resident grid of more than {MAX_PRE_RESIDENT_TOKENS} tokens runs "
            "alone"
        )
    return "overlap is none: the dynamic path fills the device"
