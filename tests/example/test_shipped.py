import re

import numpy as np
import pytest

from examples.flax_moe import checkpoint, demo, evaluate, generate, score
from examples.flax_moe.decode import Generator, Statistics
from jax_b12x import moe


@pytest.fixture(scope="module")
def shipped():
    return checkpoint.load_quantized(checkpoint.SHIPPED)


def test_the_shipped_checkpoint_is_nvfp4_in_modelopts_layout_and_small():
    size = sum(file.stat().st_size for file in checkpoint.SHIPPED.iterdir())
    assert size <= 15_000_000
    opened = moe.Checkpoint(checkpoint.SHIPPED)
    weight = opened.tensor("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert weight.dtype == "U8"
    assert opened.tensor("model.layers.0.mlp.experts.0.gate_proj.weight_scale").dtype == "F8_E4M3"
    assert opened.config()["quantization_config"]["quant_algo"] == "NVFP4"


def test_the_shipped_model_predicts_the_held_out_text(shipped, text):
    model, record = shipped
    bits = score.bits_per_byte(model, text.held_out[:4096], batch=4)
    # The beginning of Ruth is not as hard as every other part of what was recorded.
    assert bits < 1.1 * record["held_out_bits_per_byte_bf16"]
    assert bits < 1.7


def test_the_shipped_models_scales_were_calibrated(shipped):
    for block in shipped[0].blocks:
        weights = block.moe.experts.weights.get_value()
        assert 0 < float(weights.w13_input_scale) < 1
        assert np.all(np.asarray(weights.w2_input_scale) < 1)


def test_the_shipped_model_writes_the_same_with_and_without_drafts(shipped, text):
    generator = Generator(shipped[0])
    statistics = Statistics.empty(3)
    for start in np.linspace(0, text.held_out.size - 40, 8, dtype=int):
        prompt = text.held_out[start : start + 40]
        plain = generator.generate(prompt, 60, speculative=False)
        drafted = generator.generate(prompt, 60, statistics=statistics)
        np.testing.assert_array_equal(drafted, plain)
    assert statistics.acceptance > 0.4
    assert statistics.tokens_per_step > 1.9


def test_the_demo_writes_and_says_how_it_did(capsys):
    demo.main(["--tokens", "40", "--bytes", "600"])
    out = capsys.readouterr().out
    assert generate.DEFAULT_PROMPT in re.sub(r"[│\s]+", " ", out)
    for what in ("tokens/s", "drafts accepted", "on the first 600 bytes", "because"):
        assert what in out


def test_generate_streams_a_continuation(capsys):
    generate.main(["--prompt", "Jas1:1 James, a servant", "--tokens", "20", "--recipe", "w4a16"])
    out = capsys.readouterr().out
    assert "Jas1:1 James, a servant" in out
    assert "of the drafts accepted" in out


def test_generate_says_what_is_wrong_with_a_prompt(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--prompt", "Ruth", "--tokens", "4000"])
    assert "are more than the context's 512" in capsys.readouterr().err


def test_evaluate_prints_both_recipes_and_the_recorded_bf16_figure(capsys):
    evaluate.main(["--bytes", "600", "--prompts", "1", "--tokens", "12"])
    out = capsys.readouterr().out
    assert re.search(r"w4a16 +│ +\d\.\d{4} ", out)
    assert re.search(r"nvfp4 +│ +\d\.\d{4} ", out)
    out = re.sub(r"\s+", " ", out)
    assert re.search(r"bf16 experts: \d\.\d+ bits per byte on the first [\d,]+ bytes", out)
