import jax
import pytest

from examples.flax_moe import checkpoint, data, quantize, train
from examples.flax_moe.config import TINY


@pytest.fixture(scope="session")
def text():
    return data.load_text()


@pytest.fixture(scope="session")
def trained(text):
    """A tiny model after a few steps of training: its trainer, parameters, and losses in nats."""
    config = train.TrainConfig(
        batch=8, learning_rate=1e-2, dropout=0.0, average=0.5, dtype="float32"
    )
    trainer = train.Trainer(TINY, config, text.train)
    state = jax.tree.map(jax.numpy.copy, trainer.start())
    losses = []
    for _ in range(6):
        state, nats = trainer.advance(state, jax.numpy.float32(1e-2), fake_quantize=False, steps=10)
        losses.append(float(nats))
    return trainer, state.params, losses


@pytest.fixture(scope="session")
def bf16_folder(trained, tmp_path_factory):
    """The tiny model as training saves it."""
    folder = tmp_path_factory.mktemp("bf16")
    checkpoint.save_bf16(folder, TINY, trained[1], {"date": "today", "command": "none"})
    return folder


@pytest.fixture(scope="session")
def observed(bf16_folder, text):
    """The tiny model, calibrated."""
    config, arrays, _ = checkpoint.load_bf16(bf16_folder)
    model = quantize.observed(config, arrays)
    quantize.calibrate(model, text.train, 8)
    return model


@pytest.fixture(scope="session")
def nvfp4_folder(observed, tmp_path_factory):
    """The tiny model in NVFP4."""
    folder = tmp_path_factory.mktemp("nvfp4")
    dense, experts = quantize.quantize(observed)
    checkpoint.save_quantized(folder, TINY, dense, experts, {"date": "today"})
    return folder


@pytest.fixture(scope="session", params=["nvfp4", "w4a16"])
def packed(request, nvfp4_folder):
    """The tiny model with packed experts, once for each recipe."""
    return checkpoint.load_quantized(nvfp4_folder, recipe=request.param)[0]
