"""Trains the example model: ``python -m examples.flax_moe.train --out DIR``.

The learning rate, and when quantization-aware training begins, follow the part of the run that is
done, counted in steps or in minutes, whichever limit comes first. What is saved is the moving
average of the parameters that had the lowest loss on the validation books.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples.flax_moe import checkpoint, data, qat, score
from examples.flax_moe.config import TINY, ModelConfig
from examples.flax_moe.model import Decoder
from jax_b12x.flax import TrainableExperts

BALANCE_WEIGHT = 0.01
DRAFT_WEIGHT = 0.3
WARMUP = 0.03
FINAL_LEARNING_RATE = 0.05
STEPS_A_CALL = 20


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How the model is trained.

    Attributes:
      batch: sequences a step.
      learning_rate: the peak.
      weight_decay: decoupled, on matrices only.
      dropout: the probability of dropping a value of a block's contribution.
      average: the decay of the moving average of the parameters.
      qat_fraction: the last part of the run that trains through NVFP4 rounding of experts.
      dtype: what the products are computed in.
      seed: of the initial parameters, the batches and the dropout.
    """

    batch: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    average: float = 0.995
    qat_fraction: float = 0.2
    dtype: str = "bfloat16"
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a training step carries on.

    Attributes:
      params: float32 parameters.
      average: their exponential moving average.
      optimizer: Adam's moments.
      step: steps done.
      key: the random key of the next step.
    """

    params: nnx.State
    average: nnx.State
    optimizer: optax.OptState
    step: jax.Array
    key: jax.Array


def build(
    config: ModelConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    dropout: float = 0.0,
    fake_quantize: bool = False,
    seed: int = 0,
) -> Decoder:
    """Returns a decoder with trainable experts, with or without NVFP4 rounding in them."""
    rngs = nnx.Rngs(seed)

    def make_experts(_: int) -> TrainableExperts:
        return TrainableExperts(
            config.num_experts,
            config.hidden,
            config.intermediate,
            dtype=dtype,
            fake_quantize_weight=qat.fake_quantize_weight if fake_quantize else None,
            fake_quantize_input=qat.fake_quantize_input if fake_quantize else None,
            rngs=rngs,
        )

    return Decoder(config, make_experts, dtype=dtype, dropout=dropout, rngs=rngs)


def with_parameters(config: ModelConfig, arrays: dict[str, np.ndarray]) -> Decoder:
    """Returns a decoder that computes in float32 with the parameters of a bfloat16 checkpoint."""
    model = build(config)
    nnx.update(model, checkpoint.unflatten(nnx.state(model, nnx.Param), arrays))
    return model


class Trainer:
    """Compiled training and evaluation steps of one configuration."""

    def __init__(self, config: ModelConfig, train: TrainConfig, text: np.ndarray) -> None:
        """Builds the models with and without rounding; they share one set of parameters."""
        self.config = config
        self.train = train
        self.text = jnp.asarray(text)
        dtype = jnp.dtype(train.dtype)
        plain = build(config, dtype=dtype, dropout=train.dropout, seed=train.seed)
        rounded = build(
            config, dtype=dtype, dropout=train.dropout, fake_quantize=True, seed=train.seed
        )
        graph, self.initial = nnx.split(plain, nnx.Param)
        self.graphs = {False: graph, True: nnx.split(rounded, nnx.Param)[0]}
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.98),
            optax.add_decayed_weights(
                train.weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
            ),
        )

    def start(self) -> TrainState:
        """Returns the state before the first step."""
        params = self.initial
        optimizer = self.optimizer.init(params)
        key = jax.random.key(self.train.seed + 1)
        return TrainState(params, params, optimizer, jnp.zeros((), jnp.int32), key)

    def losses(
        self, params: nnx.State, windows: jax.Array, key: jax.Array, *, fake_quantize: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the training loss, and the mean negative log-likelihood of the next byte in nats.

        Args:
          params: the parameters.
          windows: ``uint8[batch, context + 1 + drafts]``.
          key: for dropout.
          fake_quantize: whether experts are rounded to NVFP4.
        """
        model = nnx.merge(self.graphs[fake_quantize], params)
        windows = windows.astype(jnp.int32)
        length = self.config.context
        ahead = [windows[:, k : k + length] for k in range(self.config.drafts + 2)]
        out = model(ahead[0], rngs=nnx.Rngs(dropout=key))
        nll = optax.softmax_cross_entropy_with_integer_labels(out.logits, ahead[1]).mean()
        drafts = model.draft_logits(out.hidden, ahead[1:-1])
        draft_nll = sum(
            optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
            for logits, target in zip(drafts, ahead[2:], strict=True)
        ) / len(drafts)
        return nll + DRAFT_WEIGHT * draft_nll + BALANCE_WEIGHT * out.balance_loss, nll

    @functools.partial(
        jax.jit, static_argnames=("self", "fake_quantize", "steps"), donate_argnums=1
    )
    def advance(
        self, state: TrainState, learning_rate: jax.Array, *, fake_quantize: bool, steps: int
    ) -> tuple[TrainState, jax.Array]:
        """Trains for some steps on random windows; returns the state and the mean loss in nats."""
        size = self.config.context + 1 + self.config.drafts

        def step(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
            key, start_key, dropout_key = jax.random.split(state.key, 3)
            starts = jax.random.randint(start_key, (self.train.batch,), 0, self.text.size - size)
            windows = self.text[starts[:, None] + jnp.arange(size)]
            loss = functools.partial(self.losses, fake_quantize=fake_quantize)
            gradients, nll = jax.grad(loss, has_aux=True)(state.params, windows, dropout_key)
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
            params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
            # Early on the average is short, or the initial parameters would stay in it for long.
            decay = jnp.minimum(self.train.average, (1 + state.step) / (10 + state.step))
            average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, params)
            return TrainState(params, average, optimizer, state.step + 1, key), nll

        state, nll = jax.lax.scan(step, state, length=steps)
        return state, nll.mean()

    def bits_per_byte(
        self, params: nnx.State, text: np.ndarray, *, fake_quantize: bool = False
    ) -> float:
        """Returns the bits a byte that ``text`` costs."""
        return score.bits_per_byte(nnx.merge(self.graphs[fake_quantize], params), text)


def learning_rate(done: float, peak: float) -> float:
    """Returns the learning rate when the part ``done`` (0 to 1) of the run is behind us."""
    if done < WARMUP:
        return peak * (done + 1e-3) / WARMUP
    cosine = 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))
    return peak * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def run(
    trainer: Trainer, split: data.Split, *, steps: int, minutes: float, evaluations: int
) -> tuple[nnx.State, checkpoint.Record]:
    """Trains until ``steps`` or ``minutes``, compilation included, have passed.

    Returns:
      The averaged parameters with the lowest validation loss, and a record of the run.
    """
    state = trainer.start()
    per_call = min(STEPS_A_CALL, steps)
    # Compile everything before the schedule starts; on a copy, because training donates its
    # argument.
    begun = time.monotonic()
    fraction = trainer.train.qat_fraction
    for fake_quantize in [False] * (fraction < 1) + [True] * (fraction > 0):
        trial, _ = trainer.advance(
            jax.tree.map(jnp.copy, state),
            jnp.float32(0),
            fake_quantize=fake_quantize,
            steps=per_call,
        )
        trainer.bits_per_byte(trial.average, split.validation, fake_quantize=fake_quantize)
    del trial
    state = jax.tree.map(jnp.copy, state)
    compiled = time.monotonic() - begun
    seconds = max(60 * minutes - compiled, 10.0)
    print(f"compiled in {compiled:.0f} s; training for at most {seconds:.0f} s", flush=True)

    best: tuple[float, nnx.State, int, bool] | None = None
    step, evaluated, train_bits, begun = 0, 0, math.nan, time.monotonic()
    while True:
        elapsed = time.monotonic() - begun
        done = max(step / steps, elapsed / seconds)
        fake_quantize = fraction > 0 and done >= 1 - fraction
        if done >= 1 or done * evaluations >= evaluated + 1:
            evaluated += 1
            loss = trainer.bits_per_byte(
                state.average, split.validation, fake_quantize=fake_quantize
            )
            print(
                f"{elapsed:6.1f} s  step {step:6d}  train {train_bits:.4f}  "
                f"validation {loss:.4f} bits/byte{'  (through NVFP4)' if fake_quantize else ''}",
                flush=True,
            )
            # Once parameters are trained through rounding, the best of those before are forgotten.
            if best is None or loss < best[0] or fake_quantize > best[3]:
                best = (loss, jax.tree.map(jnp.copy, state.average), step, fake_quantize)
        if done >= 1:
            break
        rate = jnp.float32(learning_rate(done, trainer.train.learning_rate))
        state, nll = trainer.advance(state, rate, fake_quantize=fake_quantize, steps=per_call)
        train_bits = float(nll) / math.log(2)
        step += per_call
    assert best is not None
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), best[1])
    record: checkpoint.Record = {
        "steps": step,
        "seconds": round(time.monotonic() - begun, 1),
        "kept_step": best[2],
        "device": jax.devices()[0].device_kind,
        "train_bits_per_byte": round(train_bits, 4),
    }
    for name, text in (("validation", split.validation), ("held_out", split.held_out)):
        record[f"{name}_bytes"] = text.size
        record[f"{name}_bits_per_byte_bf16"] = round(trainer.bits_per_byte(params, text), 4)
        record[f"{name}_bits_per_byte_rounded"] = round(
            trainer.bits_per_byte(params, text, fake_quantize=True), 4
        )
    return params, record


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop here if it comes first")
    parser.add_argument("--evaluations", type=int, default=20, help="how often to validate")
    parser.add_argument(
        "--evaluation-bytes", type=int, help="of validation and held-out text; all if not given"
    )
    parser.add_argument("--tiny", action="store_true", help="a model for trying things out")
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    options = parser.parse_args(argv)
    config = TINY if options.tiny else ModelConfig()
    train = TrainConfig(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(TrainConfig)}
    )
    split = data.load_text()
    split = split._replace(
        validation=split.validation[: options.evaluation_bytes],
        held_out=split.held_out[: options.evaluation_bytes],
    )
    trainer = Trainer(config, train, split.train)
    size = sum(p.size for p in jax.tree.leaves(trainer.initial))
    print(f"{size / 1e6:.1f} M parameters; {split.train.size} bytes of text; {train}", flush=True)
    params, record = run(
        trainer,
        split,
        steps=options.steps,
        minutes=options.minutes,
        evaluations=options.evaluations,
    )
    # Where the checkpoint lay on that machine is nobody's business later on.
    arguments = [
        "DIR" if argument == str(options.out) else argument for argument in argv or sys.argv[1:]
    ]
    record["command"] = "python -m examples.flax_moe.train " + " ".join(arguments)
    record["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    record["jax"] = jax.__version__
    print(record, flush=True)
    checkpoint.save_bf16(options.out, config, params, record)


if __name__ == "__main__":
    main()
