"""Launch geometry on CPUs. ``ffi/host/moe_scratch.h`` lays the scratch out in the same order."""

from __future__ import annotations

from jax_b12x.moe.geometry import Geometry, Request

# More tokens than this go to the dynamic path, where an expert meets enough of them to pay for
# unpacking a tile of its weights.
MAX_DECODE_TOKENS = 16
# Whether a decode path that is forced for more tokens runs as several launches of so many.
SPLITS_DECODE = False

_ALIGNMENT = 64
# The dynamic path works through the tokens in slabs whose results of the second product fit this.
_SLAB_BYTES = 64 << 20
_MIN_SLAB_TOKENS = 64
_MAX_SLAB_TOKENS = 1024


def unsupported(request: Request, implementation: str) -> str | None:
    """Returns why ``implementation`` cannot run ``request``: on CPU every one can."""
    del request, implementation
    return None


def geometry(request: Request, implementation: str) -> Geometry:
    """Returns the launch parameters of ``implementation`` for ``request``."""
    slab_tokens = max(1, request.num_tokens)
    if implementation == "dynamic":
        fitting = _SLAB_BYTES // (4 * request.top_k * request.hidden)
        slab_tokens = min(slab_tokens, max(_MIN_SLAB_TOKENS, min(fitting, _MAX_SLAB_TOKENS)))
    return Geometry(
        parameters=(("slab_tokens", slab_tokens),),
        scratch_bytes=_scratch_bytes(request, slab_tokens),
    )


def _scratch_bytes(request: Request, slab_tokens: int) -> int:
    routes = slab_tokens * request.top_k
    parts = (
        slab_tokens * _row_bytes(request, request.hidden),  # activations, prepared
        routes * _row_bytes(request, request.intermediate),  # intermediates, prepared
        routes * request.hidden * 4,  # results of the second product
        routes * 4,  # routes in the order of their experts
        (request.num_experts + 1) * 4,  # where each expert's routes begin
        min(routes, request.num_experts) * 4,  # the experts that have routes
    )
    # The last alignment is for the buffer itself, which may begin anywhere.
    return sum(_round_up(part, _ALIGNMENT) for part in parts) + _ALIGNMENT


def _row_bytes(request: Request, columns: int) -> int:
    """Returns the size of one row of activations as the kernels read it."""
    if request.recipe.quantized_activations:
        return _round_up(columns, 128) * 2  # per 128 columns: codes, sums and scales
    return _round_up(columns, 32) * 4  # fp32


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
