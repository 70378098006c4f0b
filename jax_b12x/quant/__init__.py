"""Formats of weights and activations, and their exact arithmetic.

Each format is a module with ``BLOCK``, ``quantize``, ``dequantize``, ``pack`` and ``unpack``; the
element formats are modules with ``encode`` and ``decode``. Everything can be traced by ``jit``, and
gives the same bits on every backend.
"""

from jax_b12x.quant import e2m1, e4m3, e8m0, mxfp4, mxfp8, nf3, nvfp4
from jax_b12x.quant.tensor import QuantizedTensor

__all__ = ["QuantizedTensor", "e2m1", "e4m3", "e8m0", "mxfp4", "mxfp8", "nf3", "nvfp4"]
