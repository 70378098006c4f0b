"""MXFP8: E4M3 elements with an E8M0 scale for 32 of them.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.1, 5.4.1 and 6.3. A block's
scale is ``2**(floor(log2(amax)) - 8)``, clamped to [2**-127, 2**127]; ``x / scale`` is exact (or
far below the smallest element), and rounded to nearest even, saturating at ±448.

What is special, and its result:

* a block of zeros: scale 2**-127, elements ±0 (the sign of a zero is kept), values ±0;
* a NaN in the block: scale NaN (0xFF), elements 0, every value of the block NaN, as in the 4-bit
  formats;
* an infinity counts as the largest finite fp32 number for the scale, and saturates;
* subnormal fp32 numbers are numbers like any other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_b12x.arguments import dtype_name
from jax_b12x.quant import blocks, e4m3
from jax_b12x.quant.tensor import QuantizedTensor

__all__ = ["BLOCK", "dequantize", "pack", "quantize", "unpack"]

BLOCK = 32


def pack(elements: jax.Array) -> jax.Array:
    """Returns ``elements: float8_e4m3fn[..., columns]`` as stored: one a byte, in order."""
    return elements


def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of :func:`pack`."""
    return packed


def quantize(x: jax.Array) -> QuantizedTensor:
    """Quantizes to MXFP8 along the last axis.

    Args:
      x: ``f32|bf16|f16[..., columns]``, ``columns`` a multiple of 32.

    Returns:
      The quantized tensor; see the module's documentation for the arithmetic.

    Raises:
      TypeError, ValueError: a dtype or shape is wrong.
    """
    q: QuantizedTensor = _quantize(x)
    return q


@jax.jit
def _quantize(x: jax.Array) -> QuantizedTensor:
    scale, scaled = blocks.mx_scale(blocks.split(x, BLOCK, "MXFP8"), e4m3.EMAX)
    return QuantizedTensor(pack(e4m3.encode(scaled)), scale, jnp.float32(1), "mxfp8")


def dequantize(q: QuantizedTensor, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns the values of an MXFP8 tensor, rounded once to fp32 and then to ``dtype``.

    Args:
      q: the tensor.
      dtype: the result's dtype.

    Returns:
      ``dtype[..., columns]``.

    Raises:
      TypeError: ``q`` is no ``QuantizedTensor``, or ``dtype`` no dtype.
      ValueError: ``q`` is not a well-formed MXFP8 tensor.
    """
    blocks.check_packed(q, "mxfp8", BLOCK)
    dtype = dtype_name("dtype", dtype)
    elements = e4m3.decode(unpack(q.data)).reshape(*q.scale.shape, BLOCK)
    return blocks.join(blocks.mx_dequantize(elements, q.scale)).astype(dtype)
