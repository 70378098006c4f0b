"""Random experts and routes for benchmarks: packed bytes are drawn, nothing is quantized."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from jax_b12x.moe.recipe import WeightFormat
from jax_b12x.moe.weights import BLOCK, ExpertWeights

# Root mean square of the sixteen E2M1 values.
_E2M1_RMS = 2.926


def random_experts(
    rng: np.random.Generator,
    num_experts: int,
    hidden: int,
    intermediate: int,
    weight_format: WeightFormat = "nvfp4",
) -> ExpertWeights:
    """Returns experts with random codes and scales, sized so that activations keep unit variance.

    Args:
      rng: the source of randomness.
      num_experts: how many.
      hidden: a multiple of the format's block.
      intermediate: a multiple of the format's block.
      weight_format: ``"nvfp4"`` or ``"mxfp4"``.
    """
    block = BLOCK[weight_format]
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size <= 0 or size % block:
            raise ValueError(f"{name} is {size}; it must be a positive multiple of {block}")

    def codes(rows: int, columns: int) -> np.ndarray:
        return rng.integers(0, 256, (num_experts, rows, columns // 2), dtype=np.uint8)

    def scales(rows: int, columns: int) -> Any:
        shape = (num_experts, rows, columns // block)
        if weight_format == "nvfp4":
            return rng.uniform(0.5, 1.5, shape).astype(ml_dtypes.float8_e4m3fn)
        # A power of two near the one that gives unit variance; mxfp4 has no global scale.
        exponent = np.round(np.log2(1 / (_E2M1_RMS * np.sqrt(columns))))
        return np.exp2(exponent + rng.integers(-1, 1, shape)).astype(ml_dtypes.float8_e8m0fnu)

    def global_scale(columns: int) -> float:
        return 1.0 if weight_format == "mxfp4" else float(1 / (_E2M1_RMS * np.sqrt(columns)))

    # Unit-variance activations stay below 6 * 448 times this.
    input_scale = 8 / (6 * 448)
    return ExpertWeights.from_arrays(
        codes(2 * intermediate, hidden),
        scales(2 * intermediate, hidden),
        codes(hidden, intermediate),
        scales(hidden, intermediate),
        format=weight_format,
        w13_global_scale=global_scale(hidden),
        w2_global_scale=global_scale(intermediate),
        w13_input_scale=input_scale,
        w2_input_scale=input_scale,
    )


def random_routes(
    rng: np.random.Generator, num_tokens: int, num_experts: int, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and weights of ``top_k`` different experts a token, uniformly drawn.

    Returns:
      ``int32[num_tokens, top_k]`` and ``float32[num_tokens, top_k]``, which sums to 1 over a token.
    """
    if not 0 < top_k <= num_experts:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to num_experts ({num_experts})")
    ids = rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((num_tokens, top_k), np.float32) + np.float32(0.1)
    return ids, weights / weights.sum(axis=1, keepdims=True)
