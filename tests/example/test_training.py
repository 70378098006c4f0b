import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.flax_moe import checkpoint, qat, train
from examples.flax_moe.config import TINY
from jax_b12x.quant import nvfp4


def test_training_lowers_the_loss(trained):
    _, _, losses = trained
    # A uniform guess costs log(128) nats; a few steps learn which bytes are frequent.
    assert losses[0] < math.log(TINY.vocab) + 1.5
    assert losses[-1] < 0.75 * losses[0]
    assert losses[-1] < 2.6


def test_training_lowers_the_loss_of_drafts_and_routes_to_all_experts(trained, text):
    trainer, params, _ = trained
    windows = jnp.asarray(text.held_out[: 4 * (TINY.context + 4)]).reshape(4, -1)
    key = jax.random.key(0)
    before, _ = trainer.losses(trainer.initial, windows, key, fake_quantize=False)
    after, nll = trainer.losses(params, windows, key, fake_quantize=False)
    drafts = (after - nll) / train.DRAFT_WEIGHT
    assert after < before
    assert drafts < 3.2


def test_rounding_in_training_gives_the_values_of_the_format():
    x = jax.random.normal(jax.random.key(0), (3, 8, 64)) * jnp.exp2(jnp.arange(-4.0, 4))[:, None]
    scale = nvfp4.global_scale(jnp.max(jnp.abs(x), axis=(1, 2)))
    expected = nvfp4.dequantize(nvfp4.quantize(x, scale[:, None]))
    np.testing.assert_allclose(qat.round_to_nvfp4(x, (1, 2)), expected, rtol=1e-6)


def test_gradients_pass_through_rounding():
    gradient = jax.grad(lambda w: jnp.sum(qat.fake_quantize_weight(w) * 3))(jnp.ones((2, 4, 16)))
    np.testing.assert_array_equal(gradient, 3)


def test_a_learning_rate_rises_then_falls():
    rates = [train.learning_rate(done, 1.0) for done in np.linspace(0, 1, 200)]
    peak = int(np.argmax(rates))
    assert rates[0] < 0.1
    assert max(rates) == pytest.approx(1, abs=0.01)
    assert rates[-1] == pytest.approx(train.FINAL_LEARNING_RATE)
    assert all(np.diff(rates[: peak + 1]) > 0)
    assert all(np.diff(rates[peak:]) < 0)


def test_a_bf16_checkpoint_gives_its_parameters_back(trained, bf16_folder):
    config, arrays, record = checkpoint.load_bf16(bf16_folder)
    assert config == TINY
    assert record["command"] == "none"
    flat = checkpoint.flatten(trained[1])
    assert set(arrays) == set(flat)
    for path, array in arrays.items():
        np.testing.assert_array_equal(array, flat[path].astype(jnp.bfloat16), err_msg=path)


def test_a_checkpoint_that_lacks_a_parameter_is_refused(bf16_folder):
    config, arrays, _ = checkpoint.load_bf16(bf16_folder)
    del arrays["norm.scale"]
    with pytest.raises(ValueError, match=r"the checkpoint lacks \['norm.scale'\]"):
        train.with_parameters(config, arrays)


def test_a_run_that_is_told_its_steps_writes_a_checkpoint(tmp_path, capsys):
    options = "--tiny --steps 2 --evaluations 1 --evaluation-bytes 300 --batch 2 --dtype float32"
    train.main([*options.split(), "--qat-fraction", "1", "--out", str(tmp_path)])
    config, _, record = checkpoint.load_bf16(tmp_path)
    assert config == TINY
    assert record["steps"] == 2
    assert 4 < record["held_out_bits_per_byte_bf16"] < 10
    assert "validation" in capsys.readouterr().out
