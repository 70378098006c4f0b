import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_b12x.moe import ExpertWeights
from jax_b12x.quant import QuantizedTensor, nvfp4

E, H, I = 3, 64, 32  # noqa: E741
quantize_under_jit = jax.jit(ExpertWeights.quantize)


def dense(rng, dtype=np.float32):
    shapes = ((E, I, H), (E, I, H), (E, H, I))
    return [jnp.asarray(rng.standard_normal(shape) * 0.05, dtype) for shape in shapes]


def arrays(rng, format="nvfp4"):
    block = 16 if format == "nvfp4" else 32
    return {
        "w13": rng.integers(0, 256, (E, 2 * I, H // 2), dtype=np.uint8),
        "w13_scale": rng.integers(0, 127, (E, 2 * I, H // block), dtype=np.uint8),
        "w2": rng.integers(0, 256, (E, H, I // 2), dtype=np.uint8),
        "w2_scale": rng.integers(0, 127, (E, H, I // block), dtype=np.uint8),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantize_keeps_gate_and_up_apart_and_each_expert_within_half_a_step(dtype):
    gate, up, down = dense(np.random.default_rng(), dtype)
    up = up * 1000
    weights = ExpertWeights.quantize(gate, up, down)
    assert (weights.hidden, weights.intermediate, weights.num_experts) == (H, I, E)
    for w, packed, scale, g in (
        (gate, weights.w13[:, :I], weights.w13_scale[:, :I], weights.w13_global_scale[:, 0]),
        (up, weights.w13[:, I:], weights.w13_scale[:, I:], weights.w13_global_scale[:, 1]),
        (down, weights.w2, weights.w2_scale, weights.w2_global_scale),
    ):
        values = nvfp4.dequantize(QuantizedTensor(packed, scale, g[:, None], "nvfp4"))
        w = np.asarray(w, np.float32)
        amax = np.abs(w).reshape(*w.shape[:2], -1, 16).max(axis=-1).repeat(16, axis=-1)
        # Half the widest gap of E2M1, 1/6 of the largest, and 1/16 for a scale that is rounded.
        assert (np.abs(values - w) <= amax * (1 / 6 + 1 / 16)).all()
        np.testing.assert_array_equal(g, nvfp4.global_scale(np.abs(w).max(axis=(1, 2))))


def test_quantize_gives_the_same_under_jit():
    w = dense(np.random.default_rng())
    eager, jitted = ExpertWeights.quantize(*w), quantize_under_jit(*w)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["w_gate", "w_up", "w_down"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_quantize_refuses_a_weight_that_is_not_finite(name, value, dtype):
    w = dict(zip(("w_gate", "w_up", "w_down"), dense(np.random.default_rng(), dtype), strict=True))
    w[name] = w[name].at[1, 5, 20].set(value)
    with pytest.raises(ValueError, match=f"{name} of expert 1 holds a weight that is infinite or"):
        ExpertWeights.quantize(**w)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_not_finite_makes_its_block_nan_under_jit_and_no_other(value):
    gate, up, down = dense(np.random.default_rng())
    # Where the block is 0 before, the others don't depend on it.
    gate = gate.at[1, 5, 16:32].set(0)
    expected = quantize_under_jit(gate, up, down)
    weights = quantize_under_jit(gate.at[1, 5, 20].set(value), up, down)
    np.testing.assert_array_equal(weights.w13_global_scale, expected.w13_global_scale)
    scale = np.asarray(weights.w13_scale, np.float32)
    assert np.isnan(scale[1, 5, 1])
    scale[1, 5, 1] = expected.w13_scale[1, 5, 1]
    np.testing.assert_array_equal(scale, np.asarray(expected.w13_scale, np.float32))
    np.testing.assert_array_equal(weights.w13, expected.w13)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
def test_from_arrays_puts_gate_rows_first(format, order):
    rng = np.random.default_rng()
    parts = arrays(rng, format)
    bias = rng.standard_normal((E, 2 * I)).astype(np.float32)
    expected = ExpertWeights.from_arrays(**parts, format=format, w13_bias=bias)
    rows = {
        "gate_up": np.arange(2 * I),
        "up_gate": np.roll(np.arange(2 * I), I),
        "interleaved": np.arange(2 * I).reshape(2, I).T.ravel(),
    }[order]
    for name in ("w13", "w13_scale"):
        parts[name] = parts[name][:, rows]
    weights = ExpertWeights.from_arrays(
        **parts, format=format, w13_bias=bias[:, rows], w13_order=order
    )
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    np.testing.assert_array_equal(weights.w13_bias, bias)


def test_from_arrays_fills_in_what_is_absent():
    weights = ExpertWeights.from_arrays(
        **arrays(np.random.default_rng()), w13_global_scale=np.array([1, 2, 3], np.float32)
    )
    np.testing.assert_array_equal(weights.w13_global_scale, [[1, 1], [2, 2], [3, 3]])
    np.testing.assert_array_equal(weights.w2_global_scale, np.ones(E))
    np.testing.assert_array_equal(weights.w2_input_scale, np.ones(E))
    assert weights.w13_input_scale.shape == ()
    assert weights.w13_bias.shape == weights.w2_bias.shape == (E, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": np.zeros((E, 2 * I, H // 2), np.int8)}, "w13 has dtype int8"),
        ({"w13": np.zeros((E, H // 2), np.uint8)}, "w13 has shape"),
        ({"w13": np.zeros((E, 63, H // 2), np.uint8)}, "w13 has shape .* must be even"),
        ({"w13": np.zeros((E, 2 * I, 12), np.uint8)}, "hidden is 24.* multiple of 16"),
        ({"w13": np.zeros((E, 2 * I + 2, H // 2), np.uint8)}, "intermediate is 33.* multiple"),
        ({"w2": np.zeros((E, H, I), np.uint8)}, r"w2 has shape \(3, 64, 32\)"),
        ({"w13_scale": np.zeros((E, 2 * I, 5), np.uint8)}, "w13_scale has shape"),
        ({"w13_scale": np.zeros((E, 2 * I, 4), np.float32)}, "w13_scale has dtype float32"),
        ({"w2_scale": np.zeros((E, H, 1), np.uint8)}, "w2_scale has shape"),
        ({"w13_global_scale": np.ones((E, 3), np.float32)}, "w13_global_scale has shape"),
        ({"w2_global_scale": np.ones(2, np.float32)}, "w2_global_scale has shape"),
        ({"w2_global_scale": 0.0}, "w2_global_scale holds 0.0"),
        ({"w13_global_scale": np.inf}, "w13_global_scale holds inf"),
        ({"w13_input_scale": np.nan}, "w13_input_scale holds nan"),
        ({"w2_input_scale": -1.0}, "w2_input_scale holds -1.0"),
        ({"w13_bias": np.zeros((E, I), np.float32)}, "w13_bias has shape"),
        ({"w2_bias": np.zeros((E, H), np.int32)}, "w2_bias has dtype int32"),
        ({"w13_order": "down"}, "w13_order is 'down'"),
        ({"format": "fp8"}, "format is 'fp8'"),
    ],
)
def test_from_arrays_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        ExpertWeights.from_arrays(**{**arrays(np.random.default_rng()), **change})


def test_quantize_names_what_is_wrong():
    gate, up, down = dense(np.random.default_rng())
    with pytest.raises(ValueError, match="w_gate has shape"):
        ExpertWeights.quantize(gate[0], up, down)
    with pytest.raises(ValueError, match="w_up has shape"):
        ExpertWeights.quantize(gate, up[:, :16], down)
    with pytest.raises(ValueError, match="w_down has shape"):
        ExpertWeights.quantize(gate, up, down.swapaxes(1, 2))
    with pytest.raises(ValueError, match="w_up has dtype int32"):
        ExpertWeights.quantize(gate, up.astype(jnp.int32), down)
    with pytest.raises(ValueError, match="hidden is 60"):
        ExpertWeights.quantize(gate[..., :60], up[..., :60], down[:, :60])


def test_expert_weights_are_a_pytree_of_ten_arrays():
    weights = ExpertWeights.quantize(*dense(np.random.default_rng()))
    leaves = jax.tree.leaves(weights)
    assert len(leaves) == 10
    static = {"format", "hidden", "intermediate", "layout"}
    names = [f.name for f in dataclasses.fields(weights) if f.name not in static]
    assert all(leaf is getattr(weights, name) for leaf, name in zip(leaves, names, strict=True))
