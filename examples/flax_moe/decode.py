"""Token by token decoding, with or without drafts that are verified several at a time.

One executable reads ``1 + drafts`` tokens a call, whether drafts are in them or not: plain decoding
leaves the other slots empty, and their routes, being -1, cost no expert anything. So speculative
and plain greedy decoding compute a token's logits with the same instructions in the same order, and
give the same tokens to the last bit; two executables of different widths could round their sums in
different orders and differ where two bytes are almost equally likely.

Source of the acceptance rule: Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (2023). At temperature 0 all distributions are one-hot, and it accepts what argmax would
say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from examples.flax_moe.attention import KVCache
from examples.flax_moe.model import Decoder
from jax_b12x import comm, lane

T = TypeVar("T")


@dataclasses.dataclass
class Statistics:
    """What a generation did.

    Attributes:
      steps: calls of the model after the prompt.
      tokens: tokens that came out.
      proposed: drafts offered, by position.
      accepted: drafts taken, by position; one behind a rejected draft is not.
    """

    steps: int
    tokens: int
    proposed: np.ndarray
    accepted: np.ndarray

    @classmethod
    def empty(cls, drafts: int) -> Statistics:
        """Returns all zeros."""
        return cls(0, 0, np.zeros(drafts, np.int64), np.zeros(drafts, np.int64))

    def __add__(self, other: Statistics) -> Statistics:
        """Joins the statistics of two generations."""
        return Statistics(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
        )

    @property
    def acceptance(self) -> float:
        """The part of all drafts that was accepted."""
        return float(self.accepted.sum() / max(1, self.proposed.sum()))

    @property
    def tokens_per_step(self) -> float:
        """How many tokens a call of the model gave."""
        return self.tokens / max(1, self.steps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequence:
    """A sequence that is being decoded.

    Attributes:
      cache: keys and values; those at ``position`` and after it are of drafts that were rejected.
      position: ``int32[]``, how many tokens were read. The last token is not yet among them.
      token: ``int32[]``, the last token.
      hidden: ``float32[hidden]``, the decoder's state at the token before the last.
    """

    cache: KVCache
    position: jax.Array
    token: jax.Array
    hidden: jax.Array


class Step(NamedTuple):
    """What one call of the model gives.

    Attributes:
      tokens: ``int32[1 + drafts]``; the first ``1 + accepted`` count.
      accepted: ``int32[]``, how many drafts were right.
      logits: ``float32[1 + drafts, vocab]``.
    """

    tokens: jax.Array
    accepted: jax.Array
    logits: jax.Array


def distribution(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns the probabilities at a temperature; at 0, one for the largest logit."""
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    warm = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1))
    return jnp.where(temperature > 0, warm, greedy)


def sample(probabilities: jax.Array, key: jax.Array) -> jax.Array:
    """Draws an ``int32[]`` from ``float32[vocab]``; the only choice where there is one."""
    return jax.random.categorical(key, jnp.log(probabilities)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="cache")
def _read(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    tokens: jax.Array,
    count: jax.Array,
    position: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Reads ``count`` of ``tokens`` from ``position`` on; returns the last one's hidden state."""
    valid = jnp.arange(tokens.shape[0]) < count
    _, hidden, cache = nnx.merge(graph, state).step(tokens, valid, position, cache)
    return hidden[count - 1], cache


@functools.partial(jax.jit, static_argnames="graph")
def _draft(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    hidden: jax.Array,
    token: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``drafts: int32[drafts]`` after ``token`` and what they were drawn from."""
    model = nnx.merge(graph, state)
    tokens, probabilities = [], []
    for step_key in jax.random.split(key, model.config.drafts):
        hidden = model.draft_head(hidden, model.embedding(token))
        logits = model.predict(model.draft_head.output_norm(hidden))
        probabilities.append(distribution(logits, temperature))
        token = sample(probabilities[-1], step_key)
        tokens.append(token)
    return jnp.stack(tokens), jnp.stack(probabilities)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="sequence")
def _verify(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    sequence: Sequence,
    drafts: jax.Array,
    draft_probabilities: jax.Array,
    num_drafts: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> tuple[Sequence, Step]:
    """Reads the last token and ``num_drafts`` drafts, keeps what the model agrees with."""
    tokens = jnp.concatenate([sequence.token[None], drafts])
    valid = jnp.arange(tokens.shape[0]) <= num_drafts
    logits, hidden, cache = nnx.merge(graph, state).step(
        tokens, valid, sequence.position, sequence.cache
    )
    p = distribution(logits, temperature)
    accept_key, sample_key = jax.random.split(key)
    at = jnp.arange(drafts.shape[0])
    threshold = jax.random.uniform(accept_key, drafts.shape) * draft_probabilities[at, drafts]
    agreed = (threshold < p[at, drafts]) & (at < num_drafts)
    accepted = jnp.sum(jnp.cumprod(agreed.astype(jnp.int32)))
    # After a rejection the rest of p that drafts do not cover is drawn from; else p itself.
    q = jnp.pad(draft_probabilities, ((0, 1), (0, 0)))[accepted]
    rest = jnp.maximum(p[accepted] - jnp.where(accepted < num_drafts, q, 0), 0)
    token = sample(rest, sample_key)
    emitted = jnp.where(at < accepted, drafts, token)
    state_there = hidden[accepted].astype(jnp.float32)
    following = Sequence(cache, sequence.position + 1 + accepted, token, state_there)
    return following, Step(jnp.append(emitted, token), accepted, logits)


class Generator:
    """Continues prompts with one model; everything it runs is compiled once.

    The decoder and its draft head are executables of their own, which run around each other in the
    lanes ``target`` and ``draft``: neither ever uses channels or workspaces of the other.
    """

    def __init__(self, model: Decoder, pool: comm.ChannelPool | None = None) -> None:
        """Splits the model into what is compiled in and what is passed in.

        Args:
          model: the model.
          pool: what it communicates on, where it is on several devices.
        """
        self.config = model.config
        self.graph, self.state = nnx.split(model)
        self.pool = pool

    def place(self, tree: T) -> T:
        """Returns arrays where the model is: on each of its devices."""
        if self.pool is None:
            return tree
        everywhere = NamedSharding(self.pool.topology.mesh, PartitionSpec())
        placed: T = jax.device_put(tree, everywhere)
        return placed

    def prefill(self, prompt: np.ndarray) -> Sequence:
        """Reads all but the last token of the prompt.

        Args:
          prompt: ``uint8[n]``, at least 2 tokens.

        Raises:
          ValueError: the prompt is too short, or longer than the context.
        """
        if not 2 <= prompt.size <= self.config.context:
            raise ValueError(
                f"the prompt has {prompt.size} bytes; it must have from 2 to the context's "
                f"{self.config.context}"
            )
        width = 1 + self.config.drafts
        cache = self.place(KVCache.zeros(self.config))
        hidden = jnp.zeros(self.config.hidden)
        for position in range(0, prompt.size - 1, width):
            chunk = prompt[position : min(position + width, prompt.size - 1)].astype(np.int32)
            tokens = np.pad(chunk, (0, width - chunk.size))
            with lane("target"):
                hidden, cache = _read(
                    self.graph, self.state, tokens, np.int32(chunk.size), np.int32(position), cache
                )
        position, token = self.place((jnp.int32(prompt.size - 1), jnp.int32(prompt[-1])))
        return Sequence(cache, position, token, hidden.astype(jnp.float32))

    def advance(
        self, sequence: Sequence, *, speculative: bool, temperature: float, key: jax.Array
    ) -> tuple[Sequence, Step]:
        """Decodes the next tokens: one, or with drafts up to ``1 + drafts``.

        The sequence given is used up: its cache lives on in the one that is returned.
        """
        draft_key, verify_key = jax.random.split(key)
        degrees = np.float32(temperature)
        drafts, probabilities = self.no_drafts()
        if speculative:
            with lane("draft"):
                drafts, probabilities = _draft(
                    self.graph, self.state, sequence.hidden, sequence.token, degrees, draft_key
                )
        num_drafts = np.int32(self.config.drafts if speculative else 0)
        arguments = (sequence, drafts, probabilities, num_drafts, degrees, verify_key)
        with lane("target"):
            return _verify(self.graph, self.state, *arguments)

    def no_drafts(self) -> tuple[jax.Array, jax.Array]:
        """Returns drafts that fill the shape and are not looked at."""
        drafts, vocab = self.config.drafts, self.config.vocab
        return self.place((jnp.zeros(drafts, jnp.int32), jnp.zeros((drafts, vocab), jnp.float32)))

    def stream(
        self,
        prompt: np.ndarray,
        max_new_tokens: int,
        *,
        speculative: bool = True,
        temperature: float = 0.0,
        seed: int = 0,
        statistics: Statistics | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the continuation, one call of the model at a time.

        Args:
          prompt: ``uint8[n]``, at least 2 tokens.
          max_new_tokens: how many tokens to add.
          speculative: whether drafts are verified.
          temperature: 0 for the likeliest token.
          seed: of the draws.
          statistics: counted up as the generation goes on.

        Raises:
          ValueError: prompt and continuation are longer than the context; the temperature is
            negative.
        """
        if prompt.size + max_new_tokens > self.config.context:
            raise ValueError(
                f"{prompt.size} bytes of prompt and {max_new_tokens} new ones are more than the "
                f"context's {self.config.context}"
            )
        if not temperature >= 0:
            raise ValueError(f"temperature is {temperature}; it must be 0 or more")
        statistics = statistics or Statistics.empty(self.config.drafts)
        sequence = self.prefill(prompt)
        key = jax.random.key(seed)
        left = max_new_tokens
        while left > 0:
            key, step_key = jax.random.split(key)
            sequence, step = self.advance(
                sequence, speculative=speculative, temperature=temperature, key=step_key
            )
            accepted = int(step.accepted)
            tokens = np.asarray(step.tokens)[: min(left, accepted + 1)].astype(np.uint8)
            left -= tokens.size
            statistics.steps += 1
            statistics.tokens += tokens.size
            if speculative:
                statistics.proposed += 1
                statistics.accepted[:accepted] += 1
            yield tokens

    def generate(self, prompt: np.ndarray, max_new_tokens: int, **options: object) -> np.ndarray:
        """Returns the whole continuation; see :meth:`stream`."""
        return np.concatenate(list(self.stream(prompt, max_new_tokens, **options)))  # type: ignore[arg-type]
