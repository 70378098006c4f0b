"""NF3: a 3-bit codebook that follows a normal distribution, with an E4M3 scale for 32 elements.

The codebook is QLoRA's NormalFloat for k = 3 bits (Dettmers et al., "QLoRA: Efficient Finetuning of
Quantized LLMs", arXiv:2305.14314, section 3, and the construction published with it). With
``offset = 1 - (1/2**4 + 1/(2**4 - 2)) / 2``: the quantiles of N(0, 1) at three even steps from
``1 - offset`` up to 1/2, zero itself, and four from 1/2 up to ``offset``, divided by the largest,
give -1, -0.53502, -0.24693, 0, 0.18334, 0.38199, 0.62299, 1. Each is rounded here to the nearest
E4M3 value, so that ``code * scale`` has at most 8 significant bits: exact in bf16, as NVFP4's
products are.

With ``g`` an optional fp32 global scale, each block is quantized in fp32, every operation rounded
once::

    scale = e4m3(amax / g)                     # saturating
    code  = nearest of CODEBOOK to x / (scale * g), ties to the even code
    value = CODEBOOK[code] * scale * g

What is special, and its result, is as in NVFP4; code 3 is the zero. The sign of a zero is not kept:
there is one zero.

Eight codes take three bytes: code ``i`` of the eight is bits ``3 * i`` to ``3 * i + 2`` of a
  little-endian 24-bit word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_b12x.arguments import dtype_name
from jax_b12x.quant import blocks, e4m3, softfloat
from jax_b12x.quant.tensor import QuantizedTensor

__all__ = [
    "BLOCK",
    "CODEBOOK",
    "ZERO",
    "decode",
    "dequantize",
    "encode",
    "pack",
    "quantize",
    "unpack",
]

BLOCK = 32
CODEBOOK = (-1.0, -0.5625, -0.25, 0.0, 0.1875, 0.375, 0.625, 1.0)
ZERO = 3


@jax.jit
def encode(x: jax.Array) -> jax.Array:
    """Returns the code of the nearest codebook value.

    Ties go to the even code; beyond ±1 it saturates; NaN gives code 3, the zero.

    Args:
      x: ``f32[...]``.

    Returns:
      ``uint8[...]``, codes 0 to 7.
    """
    code = jnp.zeros(x.shape, jnp.uint8)
    for lower, upper, even_above in zip(CODEBOOK, CODEBOOK[1:], (False, True) * 4, strict=False):
        midpoint = np.float32((lower + upper) / 2)
        code += (x >= midpoint if even_above else x > midpoint).astype(jnp.uint8)
    return jnp.where(softfloat.is_nan(x), np.uint8(ZERO), code)


@jax.jit
def decode(codes: jax.Array) -> jax.Array:
    """Returns the ``f32[...]`` values of ``codes: uint8[...]``; the upper five bits are ignored."""
    return jnp.asarray(CODEBOOK, jnp.float32)[codes & np.uint8(7)]


@jax.jit
def pack(codes: jax.Array) -> jax.Array:
    """Packs eight codes in three bytes.

    Args:
      codes: ``uint8[..., columns]`` below 8; ``columns`` is a multiple of 8.

    Returns:
      ``uint8[..., columns // 8 * 3]``.

    Raises:
      ValueError: ``columns`` is no multiple of 8.
    """
    if codes.shape[-1] % 8:
        raise ValueError(
            f"codes have {codes.shape[-1]} columns; eight share three bytes, so it must be a "
            f"multiple of 8"
        )
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8).astype(jnp.uint32)
    word = jnp.zeros(groups.shape[:-1], jnp.uint32)
    for i in range(8):
        word |= (groups[..., i] & np.uint32(7)) << np.uint32(3 * i)
    parts = jnp.stack([word >> np.uint32(8 * i) & np.uint32(0xFF) for i in range(3)], axis=-1)
    return parts.astype(jnp.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // 8 * 3)


@jax.jit
def unpack(packed: jax.Array) -> jax.Array:
    """The inverse of :func:`pack`: ``uint8[..., 3 * n]`` to codes ``uint8[..., 8 * n]``."""
    parts = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3).astype(jnp.uint32)
    word = parts[..., 0] | parts[..., 1] << np.uint32(8) | parts[..., 2] << np.uint32(16)
    codes = jnp.stack([word >> np.uint32(3 * i) & np.uint32(7) for i in range(8)], axis=-1)
    return codes.astype(jnp.uint8).reshape(*packed.shape[:-1], packed.shape[-1] // 3 * 8)


def quantize(x: jax.Array, global_scale: jax.typing.ArrayLike = 1.0) -> QuantizedTensor:
    """Quantizes to NF3 along the last axis.

    Args:
      x: ``f32|bf16|f16[..., columns]``, ``columns`` a multiple of 32.
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
    x_blocks = blocks.split(x, BLOCK, "NF3")
    g = blocks.global_scale_array(global_scale, x_blocks.shape[:-2])
    scale = blocks.relative_to_global_scale(blocks.amax(x_blocks), g)
    ratio, empty = blocks.quotients(x_blocks, scale, g)
    codes = jnp.where(empty, np.uint8(ZERO), encode(ratio))
    return QuantizedTensor(pack(codes), scale, g, "nf3")


def dequantize(
    q: QuantizedTensor,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    apply_global_scale: bool = True,
) -> jax.Array:
    """Returns the values of an NF3 tensor.

    Args:
      q: the tensor.
      dtype: the result's dtype; values are computed in fp32 and then rounded to it.
      apply_global_scale: if false, gives ``codebook * scale``, which bf16 holds exactly.

    Returns:
      ``dtype[..., columns]``.

    Raises:
      TypeError: ``q`` is no ``QuantizedTensor``, or ``dtype`` no dtype.
      ValueError: ``q`` is not a well-formed NF3 tensor.
    """
    blocks.check_packed(q, "nf3", BLOCK)
    dtype = dtype_name("dtype", dtype)
    elements = decode(unpack(q.data)).reshape(*q.scale.shape, BLOCK)
    values = elements * e4m3.decode(q.scale)[..., None]
    if apply_global_scale:
        values = blocks.apply_global_scale(values, q.global_scale)
    return blocks.join(values).astype(dtype)
