import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.flax_moe import checkpoint, quantize, score, train
from examples.flax_moe.config import TINY
from jax_b12x import moe
from jax_b12x.quant import nvfp4


def test_calibration_notes_the_largest_magnitude_that_enters_each_product(text, bf16_folder):
    config, arrays, _ = checkpoint.load_bf16(bf16_folder)
    model = quantize.observed(config, arrays)
    quantize.calibrate(model, text.train, 2, batch=1)
    block = model.blocks[0]
    starts = [0, text.train.size - TINY.context]
    tokens = jnp.stack([jnp.asarray(text.train[s : s + TINY.context]) for s in starts])
    x = model.embed(tokens.astype(jnp.int32))
    x = x + block.attention(block.attention_norm(x))
    inputs = block.moe_norm(x).reshape(-1, TINY.hidden)
    ids = np.asarray(block.moe.route(inputs).topk_ids)
    h = np.abs(block.moe.experts.intermediates(inputs))
    np.testing.assert_allclose(
        block.moe.experts.input_amax[...], jnp.max(jnp.abs(inputs)), rtol=1e-5
    )
    for e in range(TINY.num_experts):
        here = np.any(ids == e, axis=1)
        expected = h[here, e].max() if here.any() else 0
        np.testing.assert_allclose(block.moe.experts.intermediate_amax[...][e], expected, rtol=1e-4)


def test_what_is_saved_loads_with_the_same_bits(observed, nvfp4_folder):
    dense, experts = quantize.quantize(observed)
    model, record = checkpoint.load_quantized(nvfp4_folder)
    assert record == {"date": "today"}
    for layer, weights in enumerate(experts):
        loaded = model.blocks[layer].moe.experts.weights.get_value()
        for name in ("w13", "w13_scale", "w13_global_scale", "w2", "w2_scale", "w2_global_scale"):
            np.testing.assert_array_equal(
                np.asarray(getattr(loaded, name)).view(np.uint8),
                np.asarray(getattr(weights, name)).view(np.uint8),
                err_msg=name,
            )
        np.testing.assert_array_equal(loaded.w13_input_scale, weights.w13_input_scale)
        np.testing.assert_array_equal(loaded.w2_input_scale, weights.w2_input_scale)
    kernel = model.blocks[0].attention.qkv.kernel[...]
    np.testing.assert_array_equal(kernel, dense["blocks.0.attention.qkv.kernel"])


def test_the_checkpoint_has_modelopts_names(nvfp4_folder):
    opened = moe.Checkpoint(nvfp4_folder)
    prefix = "model.layers.1.mlp.experts.3.down_proj"
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        assert f"{prefix}.{part}" in opened.names
    quantization = json.loads((nvfp4_folder / "config.json").read_text())["quantization_config"]
    assert quantization["quant_algo"] == "NVFP4"


def test_packed_experts_compute_what_the_dequantized_ones_do(observed, packed):
    block = packed.blocks[0].moe
    x = observed.blocks[0].moe_norm(observed.embed(jnp.arange(1, 40)))
    weights = block.experts.weights.get_value()
    route = block.route(x)
    reference = jax.jit(functools.partial(moe.reference.moe, recipe=block.experts.recipe))
    expected = reference(x, weights, route.topk_ids, route.topk_weights)
    got = block.experts(x, route.topk_ids, route.topk_weights)
    # fp32 sums of 64 products, in another order.
    bound = 64 * np.finfo(np.float32).eps * np.abs(expected).max()
    if block.experts.recipe == "nvfp4":
        # An intermediate next to a rounding boundary may round to the neighbouring E2M1 code.
        largest = (
            weights.w2_input_scale.max() * nvfp4.dequantize(nvfp4.quantize(jnp.ones((1, 16)))).max()
        )
        bound += 4 * float(largest)
    np.testing.assert_allclose(got, expected, atol=bound)


def test_quantization_costs_few_bits(packed, bf16_folder, text):
    config, arrays, _ = checkpoint.load_bf16(bf16_folder)
    part = text.held_out[:2000]
    exact = score.bits_per_byte(train.with_parameters(config, arrays), part)
    rounded = score.bits_per_byte(packed, part)
    assert rounded == pytest.approx(exact, abs=0.15)
    assert rounded != exact


def test_another_models_checkpoint_is_refused(nvfp4_folder, tmp_path):
    config = json.loads((nvfp4_folder / "config.json").read_text())
    config["model"]["layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((nvfp4_folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"unknown .*blocks\.1\."):
        checkpoint.load_quantized(tmp_path)
