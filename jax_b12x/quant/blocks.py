"""What the block formats share: argument checks, blocks along the last axis, MX scales."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_b12x.arguments import as_array, check_kind
from jax_b12x.quant import e4m3, e8m0, softfloat
from jax_b12x.quant.tensor import Format, QuantizedTensor

_INPUT_DTYPES = ("float32", "bfloat16", "float16")
_MAX_FINITE = np.uint32(0x7F7FFFFF)
_INF = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)


def split(x: jax.Array, block: int, format_name: str) -> jax.Array:
    """Checks ``x: [..., columns]`` and returns it as ``f32[..., columns // block, block]``.

    Raises:
      TypeError: the dtype is none of float32, bfloat16, float16.
      ValueError: ``x`` is a scalar, or ``columns`` is no multiple of ``block``.
    """
    x = as_array("x", x)
    if x.dtype.name not in _INPUT_DTYPES:
        raise TypeError(
            f"x has dtype {x.dtype.name}; {format_name} quantizes {', '.join(_INPUT_DTYPES)}"
        )
    if x.ndim == 0:
        raise ValueError(
            f"x is a scalar; {format_name} needs at least one axis, of a multiple of {block}"
        )
    if x.shape[-1] % block:
        raise ValueError(
            f"x has shape {x.shape}; {format_name} needs a last axis that is a multiple of {block}"
        )
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)


def join(blocks: jax.Array) -> jax.Array:
    """The inverse of :func:`split`: ``[..., n, block]`` to ``[..., n * block]``."""
    return blocks.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])


def spread(values: jax.Array, block: int) -> jax.Array:
    """Repeats each block's integer for its elements: ``[..., n]`` to ``[..., n * block]``.

    The barriers keep XLA from computing the value again for every element, and from fusing loops
    over blocks into the loop over elements: together they make quantization ten times faster on a
    CPU. Floats are spread as their bits, for the reason that :mod:`softfloat` gives.
    """
    barrier: Callable[[jax.Array], jax.Array] = lax.optimization_barrier
    return barrier(jnp.repeat(barrier(values), block, axis=-1))


def amax(blocks: jax.Array) -> jax.Array:
    """Returns the largest magnitude of each block, NaN where there is a NaN.

    Compared as integers: a float comparison would take subnormal numbers for zero on a CPU.

    Args:
      blocks: ``f32[..., n, block]``.

    Returns:
      ``f32[..., n]``.
    """
    return softfloat.from_bits(jnp.max(softfloat.magnitude_bits(blocks), axis=-1))


def check_packed(q: QuantizedTensor, expected: Format, block: int) -> None:
    """Checks that ``q`` is a tensor of the expected format whose parts fit together.

    Raises:
      TypeError: it is no ``QuantizedTensor``.
      ValueError: it is not; the message names the part.
    """
    check_kind("q", q, QuantizedTensor, f"a QuantizedTensor, as quantization to {expected} gives")
    if q.format != expected:
        raise ValueError(f"q is a {q.format} tensor; this is the dequantization of {expected}")
    blocks = (*q.shape[:-1], q.shape[-1] // block)
    if q.shape[-1] % block or q.scale.shape != blocks:
        raise ValueError(
            f"q.scale has shape {q.scale.shape}; {q.shape[-1]} columns in blocks of {block} "
            f"need {blocks}"
        )


def global_scale_array(global_scale: jax.typing.ArrayLike, leading: tuple[int, ...]) -> jax.Array:
    """Returns ``global_scale`` as ``f32``, checked to broadcast against the ``leading`` axes.

    Raises:
      ValueError: it does not.
    """
    g = as_array("global_scale", global_scale, jnp.float32)
    try:
        fits = np.broadcast_shapes(g.shape, leading) == leading
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"global_scale has shape {g.shape}; it must broadcast against the leading axes "
            f"{leading}"
        )
    return g


def relative_to_global_scale(value: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the E4M3 block scale of ``value / g``.

    Args:
      value: ``f32[..., n]``: what each block's scale times ``g`` should be.
      g: ``f32``, broadcast against the leading axes.

    Returns:
      ``float8_e4m3fn[..., n]``, saturated; NaN where ``value`` is, otherwise 0 where ``g`` is not
      positive and finite.
    """
    g = g[..., None]
    scale = e4m3.encode(softfloat.divide(value, g))
    nan = e4m3.encode(jnp.float32(np.nan))
    unusable = ~softfloat.is_positive_and_finite(softfloat.to_bits(g))
    scale = jnp.where(unusable, jnp.zeros_like(scale), scale)
    return jnp.where(softfloat.is_nan(value), nan, scale)


def quotients(blocks: jax.Array, scale: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides elements by the step of their block, ``scale * g`` rounded once to fp32.

    Args:
      blocks: ``f32[..., n, block]``.
      scale: ``float8_e4m3fn[..., n]``.
      g: ``f32``, broadcast against the leading axes.

    Returns:
      ``f32[..., n * block]``, rounded once, an infinity where the element is one; and where the
      block means zeros or NaN, ``bool[..., n * block]``: there the quotient means nothing.
    """
    unscaled = e4m3.decode(scale)
    step = softfloat.to_bits(softfloat.multiply_short(unscaled, g[..., None]))
    # The scale of a block that means zeros is 0; with any other the product is no smaller than the
    # smallest subnormal number.
    step = jnp.where(softfloat.is_zero(unscaled) | softfloat.is_nan(unscaled), _NAN, step)
    divisor = softfloat.from_bits(spread(step, blocks.shape[-1]))
    elements = join(blocks)
    # An infinity saturates whatever the step is, and infinity / infinity would be NaN.
    infinite = softfloat.magnitude_bits(elements) == _INF
    bits = softfloat.to_bits(softfloat.divide(elements, divisor))
    bits = jnp.where(infinite, softfloat.to_bits(elements), bits)
    return softfloat.from_bits(bits), softfloat.is_nan(divisor)


def apply_global_scale(values: jax.Array, g: jax.Array) -> jax.Array:
    """Returns ``values * g`` in fp32, with subnormal factors and results taken for zero.

    Args:
      values: ``f32[..., n, block]``, unscaled.
      g: ``f32``, broadcast against the leading axes; what is not positive and finite counts as 0.
    """
    usable = softfloat.is_normal(g) & softfloat.is_positive_and_finite(softfloat.to_bits(g))
    g = jnp.where(usable, g, np.float32(0))[..., None, None]
    product = values * g
    tiny = softfloat.magnitude_bits(product) < np.float32(2.0**-126).view(np.uint32)
    return jnp.where(tiny, product * np.float32(0), product)


def mx_scale(blocks: jax.Array, emax: int) -> tuple[jax.Array, jax.Array]:
    """Chooses MX block scales: ``2**(floor(log2(amax)) - emax)``, clamped to what E8M0 holds.

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3. Where it leaves the
    choice open: an infinity counts as the largest finite fp32 number, a block of zeros gets the
    smallest scale 2**-127, a block with a NaN the scale NaN.

    Args:
      blocks: ``f32[..., n, 32]``.
      emax: exponent of the element format's largest binade.

    Returns:
      The scales ``float8_e8m0fnu[..., n]``, and ``blocks / scale`` as ``f32[..., n * 32]``, exact,
      with 0 in NaN blocks.
    """
    largest = amax(blocks)
    nan = softfloat.is_nan(largest)
    bits = jnp.minimum(softfloat.magnitude_bits(largest), _MAX_FINITE)
    # floor(log2) of a subnormal number is below -127 + emax in any case: the scale is 2**-127.
    scale = e8m0.encode((bits >> np.uint32(23)).astype(jnp.int32) - 127 - emax, nan)
    # 512 stands for NaN: it is outside the exponents' range.
    exponent = spread(jnp.where(nan, 512, -e8m0.decode(scale)[0]), blocks.shape[-1])
    scaled = softfloat.scale_by_power_of_two(join(blocks), exponent)
    return scale, jnp.where(exponent == 512, np.float32(0), scaled)


def mx_dequantize(elements: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``elements: f32[..., n, 32]`` times ``scale: float8_e8m0fnu[..., n]``."""
    exponent, nan = e8m0.decode(scale)
    values = softfloat.scale_by_power_of_two(elements, exponent[..., None])
    return jnp.where(nan[..., None], np.float32(np.nan), values)
