"""IEEE binary32 products and quotients that come out the same on every XLA backend.

A quantizer's bytes must not depend on where it ran. XLA's own arithmetic does not promise that: its
CPU backend flushes subnormal numbers to zero, it turns a division by a constant into a product with
the rounded reciprocal, and its GPU backend divides to within two units in the last place. Here a
float is taken apart into integers, and a hardware division is only the first guess at a quotient
that integers then correct. The result is rounded to nearest even, subnormal numbers included, with
and without ``jit``.

Integers alone are not enough. XLA's CPU backend runs with subnormal numbers read as zero but does
not tell LLVM so, and LLVM takes ``to_bits(x) & 0x7FFFFFFF == 0`` for ``x == 0.0``, which is then
true of subnormal numbers. Whether it does depends on how XLA happened to fuse: the same function
can be right in one program and wrong in the next. Two rules keep clear of it, here and in the
formats:

* bits that were a float's are never compared with zero, neither ``== 0`` nor ``> 0``: whether a
  number is zero is asked of its normalized mantissa (:func:`is_zero`), and a range that leaves zero
  out is one unsigned comparison (:func:`is_positive_and_finite`);
* a number that may be subnormal is chosen, spread and stored as bits.

Comparing bits with infinity, with the smallest normal number or with any other is safe: the float
comparison that it may become gives the same answer with subnormal numbers read as zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# NumPy scalars: they are constants of the traced program, and importing this starts no backend.
_INF = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)
_SIGN = np.uint32(0x80000000)
_IMPLICIT_ONE = np.uint32(1 << 23)
_ONE = np.uint32(0x3F800000)


def to_bits(x: jax.Array) -> jax.Array:
    """Returns the ``uint32`` bits of ``x: f32[...]``."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Returns the ``f32`` whose bits are ``bits: uint32[...]``."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``|x|``; they order like the magnitudes, with NaN above infinity."""
    return to_bits(x) & ~_SIGN


def is_nan(x: jax.Array) -> jax.Array:
    """Tells where ``x: f32[...]`` is NaN."""
    return magnitude_bits(x) > _INF


def is_normal(x: jax.Array) -> jax.Array:
    """Tells where ``x: f32[...]`` is finite and neither zero nor subnormal."""
    bits = magnitude_bits(x)
    return (bits >= _IMPLICIT_ONE) & (bits < _INF)


def is_positive_and_finite(bits: jax.Array) -> jax.Array:
    """Tells where ``bits: uint32[...]`` are a positive finite float's, subnormal or normal."""
    return bits - np.uint32(1) < _INF - np.uint32(1)


def is_zero(x: jax.Array) -> jax.Array:
    """Tells where ``x: f32[...]`` is 0 or -0; a subnormal number is not."""
    bits = magnitude_bits(x)
    return (bits < _INF) & _lacks_leading_one(_decompose(jnp.where(bits < _INF, bits, 0))[0])


def _lacks_leading_one(mantissa: jax.Array) -> jax.Array:
    """Tells where a mantissa of :func:`_decompose` is zero, in a way that LLVM sees no float in."""
    return mantissa < _IMPLICIT_ONE


def _decompose(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Writes a finite magnitude as ``m * 2**e``; ``2**23 <= m < 2**24``, or 0 for zero."""
    exponent = (bits >> np.uint32(23)).astype(jnp.int32)
    fraction = bits & (_IMPLICIT_ONE - np.uint32(1))
    subnormal = exponent == 0
    shift = jnp.where(subnormal, lax.clz(fraction).astype(jnp.int32) - 8, 0)
    mantissa = jnp.where(
        subnormal, fraction << jnp.minimum(shift, 23).astype(jnp.uint32), fraction | _IMPLICIT_ONE
    )
    return mantissa, jnp.where(subnormal, 1, exponent) - 150 - shift


def _compose(m: jax.Array, e: jax.Array) -> jax.Array:
    """Rounds ``m * 2**e``, ``m: uint32`` below 2**31, to the nearest even magnitude's bits."""
    top = 31 - lax.clz(m).astype(jnp.int32)
    exponent = jnp.maximum(top + e, -126)
    right = exponent - 23 - e
    left = jnp.clip(-right, 0, 31).astype(jnp.uint32)
    drop = jnp.clip(right, 0, 31).astype(jnp.uint32)
    kept = (m << left) >> drop
    rest = m - (kept << drop)
    half = jnp.where(drop > 0, np.uint32(1) << (jnp.maximum(drop, np.uint32(1)) - np.uint32(1)), 0)
    up = (drop > 0) & ((rest > half) | ((rest == half) & ((kept & np.uint32(1)) == 1)))
    mantissa = jnp.where(right >= 32, np.uint32(0), kept + up.astype(jnp.uint32))
    # The mantissa's leading bit, or the carry out of rounding, adds one to the exponent field.
    bits = (jnp.clip(exponent + 126, 0, 254).astype(jnp.uint32) << np.uint32(23)) + mantissa
    overflow = (exponent > 127) | (bits >= _INF)
    return jnp.where(m == 0, np.uint32(0), jnp.where(overflow, _INF, bits))


def _finish(magnitude: jax.Array, x: jax.Array, y: jax.Array, nan: jax.Array) -> jax.Array:
    sign = (to_bits(x) ^ to_bits(y)) & _SIGN
    return from_bits(jnp.where(nan, _NAN, magnitude | sign))


@jax.jit
def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``x / y`` as IEEE 754 defines it, rounded once to nearest even.

    Nothing is divided by zero on the way: where ``y`` is 0 the answer (infinity, or NaN for 0 / 0)
    is chosen, and the integers that are divided are those of 1.

    Args:
      x: ``f32[...]``.
      y: ``f32[...]``, broadcast against ``x``.

    Returns:
      ``f32[...]``.
    """
    x, y = jnp.broadcast_arrays(x, y)
    xb, yb = magnitude_bits(x), magnitude_bits(y)
    x_finite, y_finite = xb < _INF, yb < _INF
    a, ea = _decompose(jnp.where(x_finite, xb, 0))
    b, eb = _decompose(jnp.where(y_finite, yb, _ONE))
    x_zero, y_zero = x_finite & _lacks_leading_one(a), _lacks_leading_one(b)
    b = jnp.where(y_zero, _IMPLICIT_ONE, b)
    # The quotient of the mantissas, below 2, with 25 fraction bits: guess, then correct by the
    # exact remainder, which is small, so that arithmetic modulo 2**32 gives it.
    divisor = b.astype(jnp.float32)
    guess = jnp.floor(a.astype(jnp.float32) / divisor * np.float32(2**25)).astype(jnp.uint32)
    # a * 2**25 modulo 2**32.
    remainder = lax.bitcast_convert_type((a << np.uint32(25)) - guess * b, jnp.int32)
    step = jnp.floor(remainder.astype(jnp.float32) / divisor).astype(jnp.int32)
    signed_b = b.astype(jnp.int32)
    remainder = remainder - step * signed_b
    low, high = remainder < 0, remainder >= signed_b
    step = step - low.astype(jnp.int32) + high.astype(jnp.int32)
    remainder = remainder + jnp.where(low, signed_b, 0) - jnp.where(high, signed_b, 0)
    quotient = guess + lax.bitcast_convert_type(step, jnp.uint32)
    sticky = (remainder != 0).astype(jnp.uint32)
    bits = _compose((quotient << np.uint32(1)) | sticky, ea - eb - 26)
    bits = jnp.where(x_zero, np.uint32(0), bits)
    bits = jnp.where(x_finite & ~y_zero, bits, _INF)
    bits = jnp.where(y_finite, bits, np.uint32(0))
    nan = (xb > _INF) | (yb > _INF) | ((xb == _INF) & (yb == _INF)) | (x_zero & y_zero)
    return _finish(bits, x, y, nan)


@jax.jit
def multiply_short(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``x * y`` as IEEE 754 defines it, rounded once, for an ``x`` of few bits.

    Args:
      x: ``f32[...]`` with at most 7 significant bits, such as a decoded E4M3 or E2M1 value.
      y: ``f32[...]``, broadcast against ``x``.

    Returns:
      ``f32[...]``.
    """
    x, y = jnp.broadcast_arrays(x, y)
    xb, yb = magnitude_bits(x), magnitude_bits(y)
    x_finite, y_finite = xb < _INF, yb < _INF
    a, ea = _decompose(jnp.where(x_finite, xb, _ONE))
    b, eb = _decompose(jnp.where(y_finite, yb, _ONE))
    zero = _lacks_leading_one(a) | _lacks_leading_one(b)
    finite = x_finite & y_finite
    bits = jnp.where(finite, _compose((a >> np.uint32(17)) * b, ea + 17 + eb), _INF)
    nan = (xb > _INF) | (yb > _INF) | (~finite & zero)
    return _finish(bits, x, y, nan)


@jax.jit
def scale_by_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns ``x * 2**exponent``, rounded once to nearest even, subnormal results included.

    Args:
      x: ``f32[...]``.
      exponent: ``int32[...]`` within [-512, 512], broadcast against ``x``.

    Returns:
      ``f32[...]``.
    """
    x, exponent = jnp.broadcast_arrays(x, exponent)
    bits = magnitude_bits(x)
    mantissa, e = _decompose(jnp.where(bits < _INF, bits, 0))
    scaled = jnp.where(bits < _INF, _compose(mantissa, e + exponent), bits)
    return from_bits(scaled | (to_bits(x) & _SIGN))
