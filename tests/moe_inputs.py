"""Random MoE inputs for tests: every E2M1 code, block scales over several binades."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_b12x.moe import ExpertWeights

BLOCK = {"nvfp4": 16, "mxfp4": 32}


def random_weights(rng, *, hidden, intermediate, num_experts, weight_format="nvfp4", bias=False):
    """Returns experts of random codes whose outputs are of the order of their inputs."""

    def matrix(rows, columns):
        codes = rng.integers(0, 256, (num_experts, rows, columns // 2), dtype=np.uint8)
        shape = (num_experts, rows, columns // BLOCK[weight_format])
        if weight_format == "nvfp4":
            scale = rng.uniform(0.25, 2.0, shape).astype(ml_dtypes.float8_e4m3fn)
        else:
            scale = rng.integers(125, 129, shape)
        return codes, scale, 1 / np.sqrt(8.0 * columns)

    w13, w13_scale, size13 = matrix(2 * intermediate, hidden)
    w2, w2_scale, size2 = matrix(hidden, intermediate)
    if weight_format == "nvfp4":
        scales = {
            "w13_global_scale": (size13 * rng.uniform(0.5, 2, (num_experts, 2))).astype(np.float32),
            "w2_global_scale": (size2 * rng.uniform(0.5, 2, num_experts)).astype(np.float32),
            "w13_input_scale": np.float32(0.01),
            "w2_input_scale": rng.uniform(0.005, 0.02, num_experts).astype(np.float32),
        }
    else:
        # No global scale: the block scales carry the size, as whole exponents.
        w13_scale = (w13_scale + int(np.round(np.log2(size13)))).astype(np.uint8)
        w2_scale = (w2_scale + int(np.round(np.log2(size2)))).astype(np.uint8)
        scales = {}
    if bias:
        scales["w13_bias"] = rng.normal(size=(num_experts, 2 * intermediate)).astype(np.float32)
        scales["w2_bias"] = rng.normal(size=(num_experts, hidden)).astype(np.float32)
    return ExpertWeights.from_arrays(w13, w13_scale, w2, w2_scale, format=weight_format, **scales)


def random_tokens(rng, *, num_tokens, hidden, num_experts, top_k, dtype):
    """Returns ``x, topk_ids, topk_weights``; each token's experts differ."""
    x = jnp.asarray(rng.normal(size=(num_tokens, hidden)), dtype)
    ids = np.argsort(rng.uniform(size=(num_tokens, num_experts)), axis=1)[:, :top_k]
    weights = rng.uniform(0.1, 1.0, (num_tokens, top_k))
    weights /= weights.sum(axis=1, keepdims=True)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)
