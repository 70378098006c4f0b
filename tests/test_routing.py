import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_b12x.moe import routing

# fp32 exp and a sum of at most 64 terms: a few dozen units in the last place.
RTOL = 64 * 2.0**-23


def softmax_oracle(logits, top_k, renormalize):
    """Token by token and in fp64: ids by repeated search, so that the first of equals wins."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        left = list(range(len(row)))
        chosen = []
        for _ in range(top_k):
            best = max(left, key=lambda e: (row[e], -e))
            chosen.append(best)
            left.remove(best)
        top = max(row)
        p = [math.exp(v - top) for v in row]
        total = sum(p[e] for e in chosen) if renormalize else sum(p)
        ids.append(chosen)
        weights.append([p[e] / total for e in chosen])
    return np.array(ids), np.array(weights)


def sigmoid_oracle(logits, top_k, bias, num_groups, topk_groups, renormalize, factor):
    ids, weights = [], []
    for row in logits:
        scores = np.asarray(jax.nn.sigmoid(row))  # the same fp32 scores, so that ties agree
        biased = scores + bias
        size = len(row) // num_groups
        group_scores = []
        for g in range(num_groups):
            two = sorted(biased[g * size : (g + 1) * size])[-2:]
            group_scores.append(np.float32(sum(two[::-1])))
        groups = sorted(range(num_groups), key=lambda g: (-group_scores[g], g))[:topk_groups]
        allowed = [e for e in range(len(row)) if e // size in groups]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
        w = np.array([float(scores[e]) for e in chosen])
        if renormalize:
            w = w / (w.sum() + 1e-20)
        ids.append(chosen)
        weights.append(w * factor)
    return np.array(ids), np.array(weights)


def tied_logits(rng, shape):
    """Logits of few distinct values, so that ties are everywhere."""
    return (rng.integers(-6, 7, shape) / 4).astype(np.float32)


@functools.lru_cache
def jitted(name):
    static = ("top_k", "renormalize", "num_groups", "topk_groups", "routed_scaling_factor")
    names = static[:2] if name == "softmax_topk" else static
    return jax.jit(getattr(routing, name), static_argnames=names)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    case=st.sampled_from([(1, 1), (8, 1), (8, 3), (8, 8), (64, 6)]),
    renormalize=st.booleans(),
    ties=st.booleans(),
)
def test_softmax_topk_is_the_oracle(seed, case, renormalize, ties):
    num_experts, top_k = case
    rng = np.random.default_rng(seed)
    shape = (5, num_experts)
    logits = tied_logits(rng, shape) if ties else rng.normal(0, 5, shape).astype(np.float32)
    ids, weights = jitted("softmax_topk")(logits, top_k=top_k, renormalize=renormalize)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    expected_ids, expected_weights = softmax_oracle(logits, top_k, renormalize)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=RTOL, atol=1e-37)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    case=st.sampled_from(
        [(8, 2, 1, 1), (16, 4, 4, 2), (16, 4, 4, 1), (16, 16, 16, 16), (64, 8, 8, 4)]
    ),
    renormalize=st.booleans(),
    ties=st.booleans(),
)
def test_sigmoid_topk_is_the_oracle(seed, case, renormalize, ties):
    num_experts, top_k, num_groups, topk_groups = case
    rng = np.random.default_rng(seed)
    shape = (5, num_experts)
    logits = tied_logits(rng, shape) if ties else rng.normal(0, 5, shape).astype(np.float32)
    bias = tied_logits(rng, num_experts) if ties else rng.normal(0, 1, num_experts)
    bias = bias.astype(np.float32)
    ids, weights = jitted("sigmoid_topk")(
        logits,
        top_k=top_k,
        correction_bias=bias,
        num_groups=num_groups,
        topk_groups=topk_groups,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
    )
    expected_ids, expected_weights = sigmoid_oracle(
        logits, top_k, bias, num_groups, topk_groups, renormalize, 2.5
    )
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=RTOL)


ROUTERS = [routing.softmax_topk, routing.sigmoid_topk]


@pytest.mark.parametrize("router", ROUTERS)
def test_equal_scores_go_to_the_lowest_index(router):
    logits = jnp.array([[0.0, -0.0, 0.0, -0.0], [1.0, 2.0, 2.0, 1.0]])
    ids, _ = router(logits, 3)
    np.testing.assert_array_equal(ids, [[0, 1, 2], [1, 2, 0]])


@pytest.mark.parametrize("router", ROUTERS)
def test_padding_tokens_get_the_padding_route(router):
    logits = jnp.asarray(np.random.default_rng().standard_normal((5, 8)), jnp.float32)
    ids, weights = router(logits, 2)
    mask = jnp.array([True, False, True, True, True])
    padded_ids, padded_weights = jax.jit(router, static_argnums=1)(
        logits, 2, num_valid_tokens=jnp.int32(4), token_mask=mask
    )
    keep = np.array([True, False, True, True, False])
    np.testing.assert_array_equal(padded_ids[keep], ids[keep])
    np.testing.assert_array_equal(padded_weights[keep], weights[keep])
    assert (np.asarray(padded_ids)[~keep] == -1).all()
    assert (np.asarray(padded_weights)[~keep] == 0).all()


@pytest.mark.parametrize("router", ROUTERS)
def test_a_nan_logit_makes_the_weights_of_its_own_token_nan_and_no_other(router):
    clean = np.random.default_rng().standard_normal((3, 8)).astype(np.float32)
    logits = clean.copy()
    logits[1, 5] = np.nan
    ids, weights = router(jnp.asarray(logits), 2)
    np.testing.assert_array_equal(ids[1], [0, 1])
    assert np.isnan(np.asarray(weights[1])).all()
    expected_ids, expected_weights = router(jnp.asarray(clean), 2)
    np.testing.assert_array_equal(ids[::2], expected_ids[::2])
    np.testing.assert_array_equal(weights[::2], expected_weights[::2])


@pytest.mark.parametrize("renormalize", [True, False])
def test_infinite_logits_are_the_largest_and_the_smallest(renormalize):
    inf = np.inf
    logits = jnp.array([[0, inf, 1, -inf], [-inf, -inf, -inf, -inf], [inf, 0, inf, 0]], jnp.float32)
    ids, weights = routing.softmax_topk(logits, 2, renormalize=renormalize)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1], [0, 2]])
    third = [0.5, 0.5] if renormalize else [0.25, 0.25]
    np.testing.assert_array_equal(weights, [[1, 0], third, [0.5, 0.5]])
    ids, weights = routing.sigmoid_topk(logits, 2)
    np.testing.assert_array_equal(ids, [[1, 2], [0, 1], [0, 2]])
    assert np.isfinite(np.asarray(weights)).all()


def test_the_correction_bias_chooses_and_does_not_weigh():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    bias = jnp.array([0.0, 0.0, 0.0, 5.0])
    ids, weights = routing.sigmoid_topk(logits, 2, correction_bias=bias, renormalize=False)
    np.testing.assert_array_equal(ids, [[3, 0]])
    np.testing.assert_array_equal(weights, jax.nn.sigmoid(jnp.array([[-1.0, 2.0]])))


@pytest.mark.parametrize("router", ROUTERS)
def test_a_padding_token_may_hold_nan(router):
    ids, weights = router(jnp.full((2, 8), jnp.nan), 2, num_valid_tokens=1)
    np.testing.assert_array_equal(ids, [[0, 1], [-1, -1]])
    np.testing.assert_array_equal(weights, [[np.nan, np.nan], [0, 0]])


def test_a_nan_correction_bias_shows_in_every_weight():
    bias = jnp.zeros(8).at[3].set(jnp.nan)
    ids, weights = routing.sigmoid_topk(jnp.ones((2, 8)), 2, correction_bias=bias)
    assert ((np.asarray(ids) >= 0) & (np.asarray(ids) < 8)).all()
    assert np.isnan(np.asarray(weights)).all()


def test_zero_tokens_give_empty_routes():
    for router in ROUTERS:
        ids, weights = router(jnp.zeros((0, 8)), 2)
        assert ids.shape == weights.shape == (0, 2)


def test_half_precision_logits_are_routed_in_fp32():
    logits = jnp.asarray(np.random.default_rng().standard_normal((4, 8)), jnp.bfloat16)
    for router in ROUTERS:
        wide = router(logits.astype(jnp.float32), 3)
        jax.tree.map(np.testing.assert_array_equal, router(logits, 3), wide)


@pytest.mark.parametrize("router", ROUTERS)
def test_bad_arguments_are_refused_by_name(router):
    logits = jnp.zeros((3, 8))
    for count in (jnp.array([3, 1]), 1.5, np.nan, True):
        with pytest.raises(ValueError, match=r"num_valid_tokens is .*; it must be one integer"):
            router(logits, 2, num_valid_tokens=count)
    with pytest.raises(ValueError, match=r"top_k is 9; it must be within \[1, 8\]"):
        router(logits, 9)
    with pytest.raises(ValueError, match="top_k is 0"):
        router(logits, 0)
    with pytest.raises(ValueError, match=r"logits has shape \(8,\)"):
        router(logits[0], 2)
    with pytest.raises(ValueError, match="logits has dtype int32"):
        router(logits.astype(jnp.int32), 2)
    with pytest.raises(ValueError, match=r"token_mask is float32\[3\]; it must be bool\[3\]"):
        router(logits, 2, token_mask=jnp.ones(3))


def test_bad_groups_are_refused_by_name():
    logits = jnp.zeros((3, 8))
    for arguments, message in (
        ({"num_groups": 3}, "num_groups is 3"),
        ({"num_groups": 0}, "num_groups is 0"),
        ({"num_groups": 4, "topk_groups": 5}, r"topk_groups is 5; it must be within \[1, 4\]"),
        ({"num_groups": 4, "topk_groups": 1}, "top_k is 3; 1 groups of 2 experts"),
        ({"correction_bias": jnp.zeros(7)}, r"correction_bias has shape \(7,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            routing.sigmoid_topk(logits, 3, **arguments)
