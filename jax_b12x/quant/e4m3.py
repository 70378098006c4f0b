"""E4M3: the 8-bit float of NVFP4's block scales and MXFP8's elements (``float8_e4m3fn``).

Source: OCP 8-bit Floating Point Specification v1.0. The largest value is 448, the smallest normal
one 2**-6, the smallest subnormal one 2**-9; there is a NaN (0x7F, 0xFF) and no infinity.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_b12x.quant import softfloat

MAX = 448.0
EMAX = 8  # exponent of the largest binade
NAN = 0x7F


@jax.jit
def encode(x: jax.Array) -> jax.Array:
    """Rounds to the nearest E4M3 value, ties to even, saturating at ±448.

    Unlike ``astype(float8_e4m3fn)``, which turns what is too large into NaN, infinities and
    overflow give ±448. A NaN stays NaN (0x7F); the sign of a zero is kept.

    Args:
      x: ``f32[...]``.

    Returns:
      ``float8_e4m3fn[...]``.
    """
    bits = softfloat.magnitude_bits(x)
    # Normal results: round the fraction to three bits, where a carry moves on into the exponent,
    # and rebias.
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    rounded = (jnp.minimum(bits, np.uint32(0x7F800000)) + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    normal = jnp.minimum(rounded - np.uint32((127 - 7) << 3), np.uint32(0x7E))
    # Subnormal results are multiples of 2**-9; the product is exact.
    is_small = bits < np.float32(2.0**-6).view(np.uint32)
    small = jnp.where(is_small, softfloat.from_bits(bits), np.float32(0)) * np.float32(512)
    subnormal = lax.round(small, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint32)
    code = jnp.where(is_small, subnormal, normal)
    code = code | ((softfloat.to_bits(x) >> np.uint32(31)) << np.uint32(7))
    code = jnp.where(softfloat.is_nan(x), np.uint32(NAN), code)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)


def decode(x: jax.Array) -> jax.Array:
    """Returns the ``f32[...]`` values of ``x: float8_e4m3fn[...]``, exactly."""
    return x.astype(jnp.float32)
