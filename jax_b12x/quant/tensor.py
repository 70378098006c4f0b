"""``QuantizedTensor``: what every format's ``quantize`` gives and its ``dequantize`` takes."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

Format = Literal["nvfp4", "mxfp4", "mxfp8", "nf3"]

# Elements for each stored item of `data`, as (elements, items).
_PACKING: dict[str, tuple[int, int]] = {
    "nvfp4": (2, 1),
    "mxfp4": (2, 1),
    "mxfp8": (1, 1),
    "nf3": (8, 3),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A block-quantized array, as a pytree; blocks lie along the last axis.

    An element's value is ``element * scale(block) * global_scale``.

    Attributes:
      data: the elements, packed. nvfp4, mxfp4: ``uint8[..., columns // 2]``, even column in the low
        nibble; mxfp8: ``float8_e4m3fn[..., columns]``; nf3: ``uint8[..., columns // 8 * 3]``.
      scale: a scale for each block, ``[..., columns // block]``. nvfp4 (block 16), nf3 (block 32):
        ``float8_e4m3fn``; mxfp4, mxfp8 (block 32): ``float8_e8m0fnu``.
      global_scale: ``float32``, broadcast against the leading axes; 1 in the MX formats, which have
        none.
      format: which of the formats.
    """

    data: jax.Array
    scale: jax.Array
    global_scale: jax.Array
    format: Format = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantized."""
        elements, items = _PACKING[self.format]
        return (*self.data.shape[:-1], self.data.shape[-1] // items * elements)
