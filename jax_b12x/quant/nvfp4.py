"""NVFP4: E2M1 elements, an E4M3 scale for 16 of them, and one fp32 scale for the tensor.

Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference" (2025) and
the block-scaling sections of the cuBLAS and Transformer Engine documentation; the fp32 scale
multiplies, as in ModelOpt checkpoints.

With ``g`` the global scale, each block is quantized in fp32, every operation rounded once to
nearest even::

    scale = e4m3((amax / 6) / g)       # saturating
    code  = e2m1(x / (scale * g))      # saturating, ties to the even code
    value = e2m1(code) * scale * g

What is special, and its result:

* a block of zeros, or one so small that its scale rounds to 0: scale 0, codes 0, value 0;
* ``g`` that is not positive and finite: scale 0, codes 0, value 0;
* a NaN in the block, whatever ``g`` is: scale NaN, codes 0, every value of the block NaN;
* an infinity: the scale saturates at 448 and the element at ±6, the rest of the block is rounded as
  ever;
* subnormal fp32 numbers are numbers like any other when quantizing; dequantizing takes a subnormal
  ``g``, or a subnormal product with it, for zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x.arguments import as_array, dtype_name
from jax_b12x.quant import blocks, e2m1, e4m3, softfloat
from jax_b12x.quant.e2m1 import pack, unpack
from jax_b12x.quant.tensor import QuantizedTensor

__all__ = ["BLOCK", "dequantize", "global_scale", "pack", "quantize", "unpack"]

BLOCK = 16


def global_scale(amax: jax.Array) -> jax.Array:
    """Returns the global scale that lets a tensor of this largest magnitude just fill the format.

    That is ``amax / (6 * 448)``; 1 where ``amax`` is 0, subnormal, infinite or NaN.

    Args:
      amax: ``f32[...]``.

    Returns:
      ``f32[...]``, positive and normal.
    """
    amax = as_array("amax", amax, jnp.float32)
    scale = softfloat.divide(amax, jnp.float32(e2m1.MAX * e4m3.MAX))
    usable = softfloat.is_normal(scale) & (softfloat.to_bits(scale) < np.uint32(1 << 31))
    return jnp.where(usable, scale, np.float32(1))


def quantize(x: jax.Array, global_scale: jax.typing.ArrayLike = 1.0) -> QuantizedTensor:
    """Quantizes to NVFP4 along the last axis.

    Args:
      x: ``f32|bf16|f16[..., columns]``, ``columns`` a multiple of 16.
      global_scale: ``f32``, broadcast against ``x.shape[:-1]``.

    Returns:
      The quantized tensor; see the module's documentation for the arithmetic.

    Raises:
      TypeError, ValueError: a dtype or shape is wrong.
    """
    q: QuantizedTensor = _quantize(x, global_scale)
    return q


@jax.jit
def _quantize(x: jax.Array, global_scale: jax.typing.ArrayLike) -> QuantizedTensor:
    x_blocks = blocks.split(x, BLOCK, "NVFP4")
    g = blocks.global_scale_array(global_scale, x_blocks.shape[:-2])
    scale = blocks.relative_to_global_scale(
        softfloat.divide(blocks.amax(x_blocks), jnp.float32(e2m1.MAX)), g
    )
    ratio, empty = blocks.quotients(x_blocks, scale, g)
    codes = jnp.where(empty, np.uint8(0), e2m1.encode(ratio))
    return QuantizedTensor(pack(codes), scale, g, "nvfp4")


def dequantize(
    q: QuantizedTensor,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    apply_global_scale: bool = True,
) -> jax.Array:
    """Returns the values of an NVFP4 tensor.

    Args:
      q: the tensor.
      dtype: the result's dtype; values are computed in fp32 and then rounded to it.
      apply_global_scale: if false, gives ``e2m1 * scale``, which bf16 holds exactly: what kernels
        multiply before the global scale is applied to the sum.

    Returns:
      ``dtype[..., columns]``.

    Raises:
      TypeError: ``q`` is no ``QuantizedTensor``, or ``dtype`` no dtype.
      ValueError: ``q`` is not a well-formed NVFP4 tensor.
    """
    blocks.check_packed(q, "nvfp4", BLOCK)
    dtype = dtype_name("dtype", dtype)
    elements = e2m1.decode(unpack(q.data)).reshape(*q.scale.shape, BLOCK)
    values = elements * e4m3.decode(q.scale)[..., None]
    if apply_global_scale:
        values = blocks.apply_global_scale(values, q.global_scale)
    return blocks.join(values).astype(dtype)
