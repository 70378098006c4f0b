"""E2M1: the 4-bit float of FP4 formats, with the values ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3. A code is ``sign << 3 |
exponent << 1 | mantissa``; there is neither an infinity nor a NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x.quant import softfloat

MAX = 6.0
EMAX = 2  # exponent of the largest binade

# Midpoints between neighbours, and whether the midpoint goes up to the (even) upper code.
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


@jax.jit
def encode(x: jax.Array) -> jax.Array:
    """Rounds to the nearest E2M1 value, ties to the even code, saturating at ±6.

    The sign of a zero, and of a value that rounds to zero, is kept. A NaN gives +6, as in PTX's
    ``cvt.rn.satfinite.e2m1x2``; the block formats never encode one.

    Args:
      x: ``f32[...]``.

    Returns:
      ``uint8[...]``, codes 0 to 15.
    """
    bits = softfloat.magnitude_bits(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for midpoint, up in _MIDPOINTS:
        threshold = np.float32(midpoint).view(np.uint32)
        code += (bits >= threshold if up else bits > threshold).astype(jnp.uint8)
    negative = (softfloat.to_bits(x) >> np.uint32(31)).astype(jnp.uint8)
    sign = jnp.where(softfloat.is_nan(x), np.uint8(0), negative << np.uint8(3))
    return code | sign


@jax.jit
def decode(codes: jax.Array) -> jax.Array:
    """Returns the ``f32[...]`` values of ``codes: uint8[...]``; the upper four bits are ignored."""
    codes = codes.astype(jnp.uint32)
    magnitude = codes & np.uint32(7)
    normal = (((magnitude >> np.uint32(1)) + np.uint32(126)) << np.uint32(23)) | (
        (magnitude & np.uint32(1)) << np.uint32(22)
    )
    half = np.uint32(0x3F000000)
    bits = jnp.where(magnitude < 2, magnitude * half, normal)
    return softfloat.from_bits(bits | ((codes & np.uint32(8)) << np.uint32(28)))


def pack(codes: jax.Array) -> jax.Array:
    """Packs two codes a byte, the even column in the low nibble.

    Args:
      codes: ``uint8[..., columns]`` below 16; ``columns`` is even.

    Returns:
      ``uint8[..., columns // 2]``.

    Raises:
      ValueError: the number of columns is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(
            f"codes have {codes.shape[-1]} columns; two share a byte, so it must be even"
        )
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    return (low & np.uint8(15)) | (high << np.uint8(4))


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of :func:`pack`: ``uint8[..., n]`` to codes ``uint8[..., 2 * n]``."""
    pairs = jnp.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
