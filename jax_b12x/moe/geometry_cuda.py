"""Launch geometry on NVIDIA GPUs."""

from __future__ import annotations

from jax_b12x.moe.geometry import Geometry, Request

# A resident grid needs every block on the GPU at once; below this many SMs one token's work does
# not fit a wave and the barrier buys nothing.
MIN_RESIDENT_SMS = 16
# More tokens than this go to the dynamic path.
MAX_DECODE_TOKENS = 64


def unsupported(request: Request, implementation: str) -> str | None:
    """Returns why ``implementation`` cannot run ``request``, or ``None`` if it can."""
    device = request.device
    if implementation == "fused" and not device.cooperative_launch:
        return "the device has no cooperative launch, which a resident grid needs"
    if implementation == "fused" and device.sm_count < MIN_RESIDENT_SMS:
        return (
            f"the device has {device.sm_count} SMs; a resident grid needs at least "
            f"{MIN_RESIDENT_SMS}"
        )
    return None


def geometry(request: Request, implementation: str) -> Geometry:
    """Returns the launch parameters of ``implementation`` for ``request``."""
    del request, implementation
    return Geometry(weight_layout="sm90")
