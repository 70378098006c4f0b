import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.flax_moe import train
from examples.flax_moe.attention import KVCache
from examples.flax_moe.config import TINY
from jax_b12x.flax import MoE, SwiGLU, TrainableExperts


def random_tokens(shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 0, TINY.vocab)


def test_a_block_is_its_routed_experts_and_its_shared_expert():
    rngs = nnx.Rngs(0)
    experts = TrainableExperts(4, 32, 16, rngs=rngs)
    block = MoE(32, 4, 2, experts=experts, shared=SwiGLU(32, 16, rngs=rngs), rngs=rngs)
    x = jax.random.normal(jax.random.key(1), (7, 32))
    y, route = block(x)
    assert route.topk_ids.shape == (7, 2)
    expected = np.array(block.shared(x))
    for token in range(7):
        for k in range(2):
            e = int(route.topk_ids[token, k])
            gate, up = jnp.split(experts.w13[...][e] @ x[token], 2)
            part = experts.w2[...][e] @ (jax.nn.silu(gate) * up)
            expected[token] += route.topk_weights[token, k] * part
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_are_not_valid_are_routed_nowhere():
    rngs = nnx.Rngs(0)
    block = MoE(32, 4, 2, experts=TrainableExperts(4, 32, 16, rngs=rngs), rngs=rngs)
    x = jax.random.normal(jax.random.key(1), (3, 32))
    y, route = block(x, jnp.array([True, False, True]))
    np.testing.assert_array_equal(route.topk_ids[1], [-1, -1])
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_array_equal(y[::2], block(x)[0][::2])


def test_balance_loss_is_one_when_experts_share_the_load_and_more_when_one_has_it_all():
    rngs = nnx.Rngs(0)
    block = MoE(32, 4, 1, experts=TrainableExperts(4, 32, 16, rngs=rngs), rngs=rngs)
    block.router.kernel[...] = jnp.eye(32, 4) * 100
    shared = block(jnp.tile(jnp.eye(4, 32), (2, 1)))[1].balance_loss()
    one = block(jnp.tile(jnp.eye(1, 32), (8, 1)))[1].balance_loss()
    np.testing.assert_allclose(shared, 1, rtol=1e-5)
    np.testing.assert_allclose(one, 4, rtol=1e-5)


def test_reading_step_by_step_with_the_cache_equals_reading_at_once():
    model = train.build(TINY, seed=3)
    tokens = random_tokens((1, 30))
    expected = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    step = nnx.jit(lambda model, *arguments: model.step(*arguments))
    cache = KVCache.zeros(TINY)
    logits, hidden = [], []
    for position in range(0, 30, 3):
        part = tokens[0, position : position + 3]
        out, h, cache = step(model, part, jnp.ones(3, bool), jnp.int32(position), cache)
        logits.append(out)
        hidden.append(h)
    # The same fp32 sums in another order, through two layers.
    np.testing.assert_allclose(np.concatenate(logits), expected.logits[0], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(np.concatenate(hidden), expected.hidden[0], rtol=2e-4, atol=2e-4)


def test_what_comes_later_changes_nothing_before_it():
    model = train.build(TINY, seed=3)
    tokens = random_tokens((1, 20))
    changed = tokens.at[0, 12:].set(random_tokens((8,), seed=1))
    before, after = (nnx.jit(lambda m, t: m(t).logits)(model, t) for t in (tokens, changed))
    np.testing.assert_allclose(before[0, :12], after[0, :12], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[0, 12:], after[0, 12:])


def test_queries_share_key_and_value_heads():
    block = train.build(TINY).blocks[0]
    heads = TINY.heads + 2 * TINY.kv_heads
    assert TINY.kv_heads < TINY.heads
    assert block.attention.qkv.kernel.shape == (TINY.hidden, heads * TINY.head_dim)


def test_drafts_are_predicted_from_the_hidden_state_and_the_tokens_since():
    model = train.build(TINY, seed=3)
    hidden = jax.random.normal(jax.random.key(0), (5, TINY.hidden))
    following = [random_tokens((5,), seed) for seed in range(TINY.drafts)]
    logits = model.draft_logits(hidden, following)
    assert len(logits) == TINY.drafts
    # Another last token changes the last draft only; another first token changes them all.
    last = model.draft_logits(hidden, [*following[:-1], following[-1] ^ 1])
    first = model.draft_logits(hidden, [following[0] ^ 1, *following[1:]])
    np.testing.assert_array_equal(last[0], logits[0])
    assert not np.allclose(last[-1], logits[-1])
    assert not any(np.allclose(a, b) for a, b in zip(first, logits, strict=True))
