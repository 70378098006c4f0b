"""E8M0: the power-of-two block scale of the MX formats (``float8_e8m0fnu``).

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.4.1. Code ``c`` means ``2**(c -
127)``; 0xFF is NaN; there is neither a zero nor a sign. Code 0, 2**-127, is subnormal in fp32, so
that it is never handled as a float here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BIAS = 127
NAN = 0xFF


def encode(exponent: jax.Array, nan: jax.Array) -> jax.Array:
    """Returns the scale ``2**exponent``, with the exponent clamped to [-127, 127].

    Args:
      exponent: ``int32[...]``.
      nan: ``bool[...]``, where the scale is NaN.

    Returns:
      ``float8_e8m0fnu[...]``.
    """
    code = jnp.clip(exponent, -BIAS, BIAS) + BIAS
    code = jnp.where(nan, NAN, code).astype(jnp.uint8)
    return lax.bitcast_convert_type(code, jnp.float8_e8m0fnu)


def decode(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes scales apart.

    Args:
      scale: ``float8_e8m0fnu[...]``.

    Returns:
      ``exponent: int32[...]``, of no meaning where the scale is NaN, and ``nan: bool[...]``.
    """
    code = lax.bitcast_convert_type(scale, jnp.uint8)
    return code.astype(jnp.int32) - BIAS, code == np.uint8(NAN)
