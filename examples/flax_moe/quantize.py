"""Quantizes a trained model: ``python -m examples.flax_moe.quantize --bf16-checkpoint DIR``.

Routed experts become NVFP4 in ModelOpt's layout; everything else stays bfloat16. The scales of what
enters the experts' products are calibrated on training text.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from examples.flax_moe import checkpoint, data
from examples.flax_moe.config import ModelConfig
from examples.flax_moe.model import Decoder
from jax_b12x import moe
from jax_b12x.flax import TrainableExperts
from jax_b12x.quant import nvfp4

CALIBRATION_WINDOWS = 64


class Amax(nnx.Variable):
    """A largest magnitude seen so far."""


class ObservedExperts(TrainableExperts):
    """Trainable experts that note the largest magnitude of what enters their products.

    Attributes:
      input_amax: ``float32[]``, over all tokens.
      intermediate_amax: ``float32[num_experts]``, over the tokens that are routed there.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, *, rngs: nnx.Rngs) -> None:
        """Initializes the experts and the notes."""
        super().__init__(num_experts, hidden, intermediate, rngs=rngs)
        self.input_amax = Amax(jnp.zeros(()))
        self.intermediate_amax = Amax(jnp.zeros(num_experts))

    def __call__(self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array) -> jax.Array:
        """Returns what the experts return."""
        self.input_amax[...] = jnp.maximum(self.input_amax[...], jnp.max(jnp.abs(x)))
        routed = jnp.any(topk_ids[..., None] == jnp.arange(self.num_experts), axis=1)
        largest = jnp.max(jnp.abs(self.intermediates(x)), axis=-1)
        seen = jnp.max(jnp.where(routed, largest, 0), axis=0)
        self.intermediate_amax[...] = jnp.maximum(self.intermediate_amax[...], seen)
        return super().__call__(x, topk_ids, topk_weights)


def observed(config: ModelConfig, arrays: dict[str, np.ndarray]) -> Decoder:
    """Returns the bfloat16 checkpoint's model, computing in float32, with observed experts."""
    rngs = nnx.Rngs(0)

    def make_experts(_: int) -> ObservedExperts:
        return ObservedExperts(config.num_experts, config.hidden, config.intermediate, rngs=rngs)

    model = Decoder(config, make_experts, rngs=rngs)
    nnx.update(model, checkpoint.unflatten(nnx.state(model, nnx.Param), arrays))
    return model


@nnx.jit
def _observe(model: Decoder, tokens: jax.Array) -> None:
    model(tokens.astype(jnp.int32))


def calibrate(model: Decoder, text: np.ndarray, num_windows: int, *, batch: int = 4) -> None:
    """Lets an observed model read windows that are spread evenly over ``text``."""
    context = model.config.context
    starts = np.linspace(0, text.size - context, num_windows, dtype=int)
    tokens = text[starts[:, None] + np.arange(context)]
    for rows in np.array_split(tokens, -(-num_windows // batch)):
        _observe(model, rows)


def quantize_experts(experts: ObservedExperts) -> moe.ExpertWeights:
    """Returns the experts in NVFP4, with the input scales that were observed."""
    gate, up = jnp.split(experts.w13[...], 2, axis=1)
    return moe.ExpertWeights.quantize(
        gate,
        up,
        experts.w2[...],
        w13_input_scale=nvfp4.global_scale(experts.input_amax[...]),
        w2_input_scale=nvfp4.global_scale(experts.intermediate_amax[...]),
    )


def quantize(model: Decoder) -> tuple[dict[str, jax.Array], list[moe.ExpertWeights]]:
    """Returns the dense parameters by path, and the quantized experts of each layer."""
    dense = {
        path: array
        for path, array in checkpoint.flatten(nnx.state(model, nnx.Param)).items()
        if not checkpoint.is_expert(path)
    }
    return dense, [quantize_experts(block.moe.experts) for block in model.blocks]


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bf16-checkpoint", type=pathlib.Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=pathlib.Path, default=checkpoint.SHIPPED, metavar="DIR")
    options = parser.parse_args(argv)
    console = Console()
    config, arrays, record = checkpoint.load_bf16(options.bf16_checkpoint)
    model = observed(config, arrays)
    with console.status("calibrating on training text"):
        calibrate(model, data.load_text().train, CALIBRATION_WINDOWS)
    dense, experts = quantize(model)
    size = checkpoint.save_quantized(options.out, config, dense, experts, record)
    console.print(f"wrote {size / 1e6:.2f} MB to {options.out}")


if __name__ == "__main__":
    main()
