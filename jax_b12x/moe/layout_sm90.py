"""The weight layout that Hopper kernels stream: packing it, and taking it apart again.

A matrix becomes tiles of 16 rows x 128 columns, 1,152 bytes each: 1,024 bytes of codes in the order
in which a warp's lanes multiply them, then 128 bytes of block scales.
``cuda/formats/fp4_tile.cuh`` describes the tile; this is the same in ``jnp``. Every bit of the
checkpoint is kept, so that :func:`unpack` gives it back.

    w13  uint8[num_experts, 2 * ceil(intermediate / 16), ceil(hidden / 128), 1152]
    w2   uint8[num_experts, ceil(hidden / 16), ceil(intermediate / 128), 1152]

A row tile of w13 holds 8 gate rows and the 8 up rows of the same columns of the intermediate, so
that one thread gets both. Sizes that do not fill tiles are padded with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

ROWS, COLUMNS = 16, 128
CODE_BYTES, SCALE_BYTES = ROWS * COLUMNS // 2, ROWS * COLUMNS // 16
TILE_BYTES = CODE_BYTES + SCALE_BYTES

# Which bits of a word of step j hold bits of its last pair; the others of that pair are in the word
# of step j + 1.
_SHARED_BITS = 0x06030603
# Bits that a code takes in each half of a word once it is in place: sign, exponent, mantissa.
_IN_PLACE = 0x81C081C0


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Returns how many tiles a matrix has in each direction."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


@functools.partial(jax.jit, static_argnames="gated")
def pack(
    packed: jax.Array,
    scale: jax.Array,
    *,
    gated: bool,
    behind: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Repacks one matrix of all experts, an expert at a time so that little memory is needed.

    Args:
      packed: ``uint8[num_experts, rows, columns // 2]``.
      scale: ``[num_experts, rows, columns // block]``, 8 bits each, ``block`` 16 or 32.
      gated: the matrix is w13: the first half of its rows are gates, the second half are ups.
      behind: ``packed`` and ``scale`` of more experts, which follow these.

    Returns:
      ``uint8[num_experts, row_tiles, column_tiles, 1152]``.
    """
    parts = [(packed, scale), *([] if behind is None else [behind])]
    one = jax.eval_shape(_pack_expert_of(packed, scale, gated), 0)
    tiled = jnp.zeros((sum(codes.shape[0] for codes, _ in parts), *one.shape), jnp.uint8)
    first = 0
    for codes, scales in parts:
        pack_one = _pack_expert_of(codes, scales, gated)

        def step(
            expert: jax.Array,
            out: jax.Array,
            first: int = first,
            pack_one: Callable[[jax.Array], jax.Array] = pack_one,
        ) -> jax.Array:
            return out.at[first + expert].set(pack_one(expert))

        tiled = lax.fori_loop(0, codes.shape[0], step, tiled)
        first += codes.shape[0]
    return tiled


def _pack_expert_of(
    packed: jax.Array, scale: jax.Array, gated: bool
) -> Callable[[jax.Array], jax.Array]:
    bits = lax.bitcast_convert_type(scale, jnp.uint8)
    return lambda expert: _pack_expert(packed[expert], bits[expert], gated=gated)


@functools.partial(jax.jit, static_argnames=("rows", "columns", "gated", "scale_dtype"))
def unpack(
    tiled: jax.Array, *, rows: int, columns: int, gated: bool, scale_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Undoes :func:`pack`.

    Args:
      tiled: what it returned.
      rows: of the matrix before it was padded.
      columns: likewise.
      gated: as it was given.
      scale_dtype: of the block scales; its block is 16 for ``float8_e4m3fn``, else 32.

    Returns:
      ``uint8[num_experts, rows, columns // 2]`` and ``scale_dtype[num_experts, rows, columns //
      block]``.
    """
    block = 16 if jnp.dtype(scale_dtype) == jnp.float8_e4m3fn else 32
    unpack_one = functools.partial(
        _unpack_expert, rows=rows, columns=columns, gated=gated, block=block
    )
    shapes = jax.eval_shape(unpack_one, tiled[0])
    out = tuple(jnp.zeros((tiled.shape[0], *s.shape), jnp.uint8) for s in shapes)

    def step(expert: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        parts = unpack_one(tiled[expert])
        return tuple(o.at[expert].set(p) for o, p in zip(out, parts, strict=True))

    codes, bits = lax.fori_loop(0, tiled.shape[0], step, out)
    return codes, lax.bitcast_convert_type(bits, scale_dtype)


def _pack_expert(packed: jax.Array, bits: jax.Array, *, gated: bool) -> jax.Array:
    columns = packed.shape[1] * 2
    block = columns // bits.shape[1]
    column_tiles = tiles(1, columns)[1]
    packed = jnp.pad(packed, ((0, 0), (0, column_tiles * COLUMNS // 2 - packed.shape[1])))
    bits = jnp.repeat(bits, block // 16, axis=1)  # a scale for every 16 columns
    bits = jnp.pad(bits, ((0, 0), (0, column_tiles * COLUMNS // 16 - bits.shape[1])))

    # [row tile, half of the rows, g, column tile, pair of steps, step of the pair, t]
    words = _rows_to_tiles(packed, gated).reshape(-1, 2, 8, column_tiles, 2, 2, 4, 4)
    first, second = _spread_bits(lax.bitcast_convert_type(words, jnp.uint32))
    words = jnp.stack([first, second], axis=-1)  # [row tile, half, g, column tile, pair, t, step]
    words = words.transpose(0, 3, 4, 2, 5, 1, 6)  # [row tile, column tile, pair, g, t, half, step]
    codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1, column_tiles, CODE_BYTES)

    # [row tile, half, g, column tile, pair of steps, step of the pair, half of the step]
    scales = _rows_to_tiles(bits, gated).reshape(-1, 2, 8, column_tiles, 2, 2, 2)
    scales = scales.astype(jnp.uint32)
    top, bottom = scales[:, 0], scales[:, 1]  # [row tile, g, column tile, pair, step, half]
    bottom = (bottom >> 4) | ((bottom & 15) << 12)
    word = (top[..., 0, :] << 4) | (top[..., 1, :] << 20) | bottom[..., 0, :]
    word = word | (bottom[..., 1, :] << 16)  # [row tile, g, column tile, pair, half]
    word = word.transpose(0, 2, 1, 4, 3)  # [row tile, column tile, g, half, pair]
    scale_bytes = lax.bitcast_convert_type(word, jnp.uint8).reshape(-1, column_tiles, SCALE_BYTES)
    return jnp.concatenate([codes, scale_bytes], axis=-1)


def _unpack_expert(
    tiled: jax.Array, *, rows: int, columns: int, gated: bool, block: int
) -> tuple[jax.Array, jax.Array]:
    column_tiles = tiled.shape[1]
    words = tiled[..., :CODE_BYTES].reshape(-1, column_tiles, 2, 8, 4, 2, 2, 4)
    words = lax.bitcast_convert_type(words, jnp.uint32).transpose(0, 5, 3, 1, 2, 4, 6)
    words = _gather_bits(
        words[..., 0], words[..., 1]
    )  # [row tile, half, g, column tile, pair, 2, t]
    codes = lax.bitcast_convert_type(words, jnp.uint8)
    codes = _tiles_to_rows(codes.reshape(-1, 2, 8, column_tiles * COLUMNS // 2), rows, gated)

    word = tiled[..., CODE_BYTES:].reshape(-1, column_tiles, 8, 2, 2, 4)
    word = lax.bitcast_convert_type(word, jnp.uint32).transpose(0, 2, 1, 4, 3)
    top = jnp.stack([word >> 4, word >> 20], axis=-2) & 0xFF
    bottom = jnp.stack([word, word >> 16], axis=-2)
    bottom = ((bottom & 15) << 4) | ((bottom >> 12) & 15)
    scales = jnp.stack([top, bottom], axis=1).astype(jnp.uint8)
    scales = _tiles_to_rows(scales.reshape(-1, 2, 8, column_tiles * COLUMNS // 16), rows, gated)
    return codes[:, : columns // 2], scales[:, : columns // 16 : block // 16]


def _rows_to_tiles(array: jax.Array, gated: bool) -> jax.Array:
    """``[rows, n]`` -> ``[row tile, half of its rows, g, n]``; 16 rows, or 8 gates and 8 ups."""
    if not gated:
        padded = jnp.pad(array, ((0, -array.shape[0] % ROWS), (0, 0)))
        return padded.reshape(-1, 2, 8, array.shape[1])
    halves = array.reshape(2, array.shape[0] // 2, array.shape[1])
    # A pair of row tiles, 16 columns of the intermediate, is one block of its quantization.
    padded = jnp.pad(halves, ((0, 0), (0, -halves.shape[1] % ROWS), (0, 0)))
    return padded.reshape(2, -1, 8, array.shape[1]).transpose(1, 0, 2, 3)


def _tiles_to_rows(tiled: jax.Array, rows: int, gated: bool) -> jax.Array:
    if not gated:
        return tiled.reshape(-1, tiled.shape[-1])[:rows]
    halves = tiled.transpose(1, 0, 2, 3).reshape(2, -1, tiled.shape[-1])
    return halves[:, : rows // 2].reshape(rows, tiled.shape[-1])


def _pair(words: jax.Array, index: int) -> jax.Array:
    """Puts codes 2 index and 2 index + 1 of each word in place."""

    def place(code: jax.Array) -> jax.Array:
        return ((code & 8) << 12) | ((code & 7) << 6)

    low = place((words >> (8 * index)) & 15)
    return low | (place((words >> (8 * index + 4)) & 15) << 16)


def _codes(pair: jax.Array, index: int) -> jax.Array:
    """Undoes :func:`_pair`."""

    def code(half: jax.Array) -> jax.Array:
        return ((half >> 12) & 8) | ((half >> 6) & 7)

    return (code(pair) | (code(pair >> 16) << 4)) << (8 * index)


def _rotate_left(words: jax.Array, by: int) -> jax.Array:
    return (words << by) | (words >> (32 - by))


def _rotate_right(words: jax.Array, by: int) -> jax.Array:
    return _rotate_left(words, 32 - by)


def _spread_bits(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Words of 8 codes ``[..., step of the pair, t]`` -> the two steps' words, bits spread."""
    steps = (words[..., 0, :], words[..., 1, :])
    spread = [
        _pair(w, 0) | _rotate_right(_pair(w, 1), 4) | _rotate_left(_pair(w, 2), 6) for w in steps
    ]
    joined = _rotate_left(_pair(steps[0], 3), 4) | _rotate_right(_pair(steps[1], 3), 6)
    second_bits = _SHARED_BITS << 2
    return (
        spread[0] | (joined & _SHARED_BITS),
        spread[1] | _rotate_right(joined & jnp.uint32(second_bits), 2),
    )


def _gather_bits(first: jax.Array, second: jax.Array) -> jax.Array:
    """Undoes :func:`_spread_bits`."""
    joined = (first & _SHARED_BITS) | _rotate_left(second & _SHARED_BITS, 2)
    last = (_rotate_right(joined, 4), _rotate_left(joined, 6))
    words = []
    for word, pair in zip((first, second), last, strict=True):
        pairs = (word, _rotate_left(word, 4), _rotate_right(word, 6), pair)
        codes = [_codes(p & jnp.uint32(_IN_PLACE), i) for i, p in enumerate(pairs)]
        words.append(codes[0] | codes[1] | codes[2] | codes[3])
    return jnp.stack(words, axis=-2)
