"""Straight-through rounding to NVFP4: the end of training sees what serving will compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def round_to_nvfp4(x: jax.Array, global_axes: tuple[int, ...]) -> jax.Array:
    """Rounds to NVFP4 and back, in blocks of 16 along the last axis.

    Args:
      x: any shape whose last axis is a multiple of 16.
      global_axes: the axes that share one global scale, ``amax / (6 * 448)``.
    """
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=global_axes, keepdims=True)
    scale = jnp.maximum(amax / (E2M1_MAX * E4M3_MAX), jnp.finfo(jnp.float32).tiny)[..., None]
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    block_amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    block_scale = jnp.minimum(block_amax / E2M1_MAX / scale, E4M3_MAX)
    block_scale = block_scale.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    step = block_scale * scale
    magnitude = jnp.minimum(jnp.abs(blocks) / jnp.where(step > 0, step, 1), E2M1_MAX)
    # E2M1 holds 0 to 2 in halves, 2 to 4 in ones, 4 and 6; halves of an even code stay even.
    grain = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    rounded = jnp.sign(blocks) * jnp.round(magnitude / grain) * grain * step
    return jnp.where(step > 0, rounded, 0).reshape(x.shape)


def fake_quantize_weight(w: jax.Array) -> jax.Array:
    """Rounds ``[num_experts, rows, columns]``, a global scale an expert; gradients pass."""
    return w + jax.lax.stop_gradient(round_to_nvfp4(w, (1, 2)) - w)


def fake_quantize_input(x: jax.Array) -> jax.Array:
    """Rounds activations, one global scale for all of them; gradients pass through."""
    rounded = round_to_nvfp4(x, tuple(range(x.ndim))).astype(x.dtype)
    return x + jax.lax.stop_gradient(rounded - x)
