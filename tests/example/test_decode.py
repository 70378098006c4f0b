import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.flax_moe import decode
from examples.flax_moe.config import TINY
from examples.flax_moe.decode import Generator, Statistics


@pytest.fixture(scope="module")
def generator(packed):
    return Generator(packed)


def prompts(text, count, size=12):
    starts = np.linspace(0, text.held_out.size - size, count, dtype=int)
    return [text.held_out[start : start + size] for start in starts]


def test_greedy_speculative_decoding_gives_the_tokens_of_plain_greedy_decoding(generator, text):
    total = Statistics.empty(TINY.drafts)
    for prompt in prompts(text, 25):
        statistics = Statistics.empty(TINY.drafts)
        plain = generator.generate(prompt, 40, speculative=False)
        drafted = generator.generate(prompt, 40, speculative=True, statistics=statistics)
        np.testing.assert_array_equal(drafted, plain)
        total = total + statistics
    # Both happened: drafts that were right, and drafts that were taken back.
    assert 0 < total.acceptance < 1
    assert total.steps < total.tokens == 25 * 40


def test_a_token_has_the_same_logits_in_every_slot(generator, text):
    """What exactness rests on: the bits of a token's logits do not depend on its neighbours."""
    for prompt in prompts(text, 8, size=20):
        following = jnp.asarray(prompt[-4:-1], jnp.int32)
        _, drafts = generator.no_drafts()
        together = decode._verify(  # all four tokens at once
            *(generator.graph, generator.state),
            dataclasses.replace(generator.prefill(prompt[:-4]), token=jnp.int32(prompt[-5])),
            *(following, drafts, np.int32(3), np.float32(0), jax.random.key(0)),
        )[1].logits
        for slot in range(4):
            _, alone = generator.advance(
                generator.prefill(prompt[: prompt.size - 4 + slot]),
                speculative=False,
                temperature=0.0,
                key=jax.random.key(0),
            )
            np.testing.assert_array_equal(alone.logits[0], together[slot])


def test_rejected_drafts_leave_no_trace_in_what_follows(generator, text):
    prompt = prompts(text, 1)[0]
    first, plain = generator.advance(
        generator.prefill(prompt), speculative=False, temperature=0.0, key=jax.random.key(0)
    )
    expected = generator.advance(first, speculative=False, temperature=0.0, key=jax.random.key(0))
    wrong = jnp.full(TINY.drafts, (int(plain.tokens[0]) + 1) % TINY.vocab, jnp.int32)
    certain = jax.nn.one_hot(wrong, TINY.vocab)
    rolled_back, step = decode._verify(
        *(generator.graph, generator.state, generator.prefill(prompt)),
        *(wrong, certain, np.int32(TINY.drafts), np.float32(0), jax.random.key(0)),
    )
    assert int(step.accepted) == 0
    assert int(step.tokens[0]) == int(plain.tokens[0])
    assert int(rolled_back.position) == prompt.size
    got = generator.advance(rolled_back, speculative=False, temperature=0.0, key=jax.random.key(0))
    np.testing.assert_array_equal(got[1].logits[0], expected[1].logits[0])


def test_drafts_that_are_right_are_all_accepted(generator, text):
    prompt = prompts(text, 1)[0]
    tokens = generator.generate(prompt, 4, speculative=False)
    right = jnp.asarray(tokens[:3], jnp.int32)
    sequence, step = decode._verify(
        *(generator.graph, generator.state, generator.prefill(prompt)),
        *(right, jax.nn.one_hot(right, TINY.vocab), np.int32(3), np.float32(0), jax.random.key(0)),
    )
    assert int(step.accepted) == 3
    np.testing.assert_array_equal(step.tokens, tokens)
    assert int(sequence.position) == prompt.size + 3


def test_drafts_do_not_change_what_is_drawn_at_a_temperature(generator, text):
    """The first token's frequencies, with drafts, are the model's probabilities."""
    prompt = prompts(text, 1)[0]
    draws = 600
    # A warm draft distribution that is far from the model's: uniform over 8 likely bytes.
    likely = jnp.asarray(np.frombuffer(b" etaoinh", np.uint8).astype(np.int32))
    q = jnp.zeros(TINY.vocab).at[likely].set(1 / 8)
    counts = np.zeros(TINY.vocab)
    p = None
    for draw in range(draws):
        draft_key, key = jax.random.split(jax.random.key(draw))
        drafts = jax.random.choice(draft_key, likely, (TINY.drafts,))
        _, step = decode._verify(
            *(generator.graph, generator.state, generator.prefill(prompt), drafts),
            *(jnp.tile(q, (TINY.drafts, 1)), np.int32(TINY.drafts), np.float32(1), key),
        )
        counts[int(step.tokens[0])] += 1
        p = np.asarray(jax.nn.softmax(step.logits[0]), np.float64)
    # Five standard deviations of a binomial for each byte, and one draw for the rarest.
    bound = 5 * np.sqrt(draws * p * (1 - p)) + 1
    assert np.all(np.abs(counts - draws * p) < bound)
    assert np.count_nonzero(counts) > 10


def test_a_seed_fixes_what_is_drawn(generator, text):
    prompt = prompts(text, 1)[0]
    draw = [generator.generate(prompt, 30, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(draw[0], draw[1])
    assert not np.array_equal(draw[0], draw[2])


def test_decoding_compiles_once(generator, text):
    generator.generate(prompts(text, 1)[0], 5, speculative=True)
    functions = (decode._read, decode._draft, decode._verify)
    before = [function._cache_size() for function in functions]
    for size in (3, 7, 20):
        generator.generate(text.held_out[:size], 9, speculative=True, temperature=0.5)
        generator.generate(text.held_out[:size], 9, speculative=False)
    assert [function._cache_size() for function in functions] == before


def test_a_text_longer_than_the_context_is_refused(generator):
    with pytest.raises(ValueError, match="60 bytes of prompt and 5 new ones are more than the co"):
        generator.generate(np.zeros(60, np.uint8), 5)
    with pytest.raises(ValueError, match="the prompt has 1 bytes; it must have from 2 to"):
        generator.generate(np.zeros(1, np.uint8), 5)
    with pytest.raises(ValueError, match="temperature is -1; it must be 0 or more"):
        generator.generate(np.zeros(3, np.uint8), 5, temperature=-1)


def test_the_last_token_of_the_context_can_be_decoded(generator, text):
    prompt = text.held_out[:20]
    plain = generator.generate(prompt, TINY.context - 20, speculative=False)
    np.testing.assert_array_equal(generator.generate(prompt, TINY.context - 20), plain)
