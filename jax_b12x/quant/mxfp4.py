"""MXFP4: E2M1 elements with an E8M0 scale for 32 of them.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3, 5.4.1 and 6.3. A block's
scale is ``2**(floor(log2(amax)) - 2)``, clamped to [2**-127, 2**127]; ``x / scale`` is exact, and
rounded to nearest even, saturating at ±6 (so that magnitudes above 6 of a block whose amax is in
(6, 8) times the scale lose their excess).

What is special, and its result:

* a block of zeros: scale 2**-127, codes ±0 (the sign of a zero is kept), values ±0;
* a NaN in the block: scale NaN (0xFF), codes 0, every value of the block NaN;
* an infinity counts as the largest finite fp32 number for the scale, and saturates;
* subnormal fp32 numbers are numbers like any other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_b12x.arguments import dtype_name
from jax_b12x.quant import blocks, e2m1
from jax_b12x.quant.e2m1 import pack, unpack
from jax_b12x.quant.tensor import QuantizedTensor

__all__ = ["BLOCK", "dequantize", "pack", "quantize", "unpack"]

BLOCK = 32


def quantize(x: jax.Array) -> QuantizedTensor:
    """Quantizes to MXFP4 along the last axis.

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
    scale, scaled = blocks.mx_scale(blocks.split(x, BLOCK, "MXFP4"), e2m1.EMAX)
    return QuantizedTensor(pack(e2m1.encode(scaled)), scale, jnp.float32(1), "mxfp4")


def dequantize(q: QuantizedTensor, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns the values of an MXFP4 tensor, exact in fp32, rounded to ``dtype``.

    Args:
      q: the tensor.
      dtype: the result's dtype.

    Returns:
      ``dtype[..., columns]``.

    Raises:
      TypeError: ``q`` is no ``QuantizedTensor``, or ``dtype`` no dtype.
      ValueError: ``q`` is not a well-formed MXFP4 tensor.
    """
    blocks.check_packed(q, "mxfp4", BLOCK)
    dtype = dtype_name("dtype", dtype)
    elements = e2m1.decode(unpack(q.data)).reshape(*q.scale.shape, BLOCK)
    return blocks.join(blocks.mx_dequantize(elements, q.scale)).astype(dtype)
