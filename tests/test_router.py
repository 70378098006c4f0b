"""``moe.routing.route``: its logits against fp64, and its choice against ``jnp`` given its logits.

A logit is a sum of ``hidden`` products in fp32, in some order: it differs from the exact one by at
most ``hidden * 2**-24`` times the sum of the products' sizes. Given the logits, ids are exact where
the scores are (softmax orders by the logits), weights differ by the exponential's 2 units in the
last place, and by the order of a sum of at most ``top_k`` (or ``num_experts``) positive terms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jax_b12x.moe import routing

CAPTURED = {"xla_gpu_graph_min_graph_size": 1}
EAGER = {"xla_gpu_graph_min_graph_size": 1 << 30}

# num_tokens, hidden, num_experts, top_k, dtype of x, dtype of the weights
CASES = [
    (1, 64, 5, 1, "bfloat16", "float32"),
    (1, 2048, 128, 8, "bfloat16", "bfloat16"),
    (2, 48, 1, 1, "float32", "float32"),
    (5, 2880, 160, 6, "float16", "float16"),
    (9, 16, 1024, 16, "bfloat16", "float16"),
    (33, 192, 256, 8, "float32", "bfloat16"),
    (70, 720, 40, 3, "bfloat16", "bfloat16"),
]
GPU_CASES = [
    (1, 6144, 256, 8, "bfloat16", "bfloat16"),
    (1, 7168, 256, 8, "bfloat16", "float32"),
    (1, 2048, 1024, 16, "float16", "float16"),
    (1, 2880, 600, 4, "float32", "float32"),
    (8, 4096, 128, 8, "bfloat16", "bfloat16"),
    (64, 2048, 256, 8, "bfloat16", "float32"),
    (130, 2880, 384, 16, "float16", "float16"),
]


def cases_of_both():
    """The CPU's cases both ways; a GPU has its own and some of these, each one way."""
    cpu = [(*case, renormalize) for case in CASES for renormalize in (True, False)]
    gpu = [(*case, i % 2 == 0) for i, case in enumerate([*GPU_CASES, *CASES[::3]])]
    return [*cpu, *(pytest.param(*case, marks=pytest.mark.gpu, id=f"gpu-{case}") for case in gpu)]


CASE_NAMES = (
    "num_tokens",
    "hidden",
    "num_experts",
    "top_k",
    "x_dtype",
    "weight_dtype",
    "renormalize",
)


def draw(rng, num_tokens, hidden, num_experts, x_dtype="bfloat16", weight_dtype="bfloat16"):
    x = jnp.asarray(rng.normal(size=(num_tokens, hidden)), x_dtype)
    weight = jnp.asarray(rng.normal(size=(num_experts, hidden)) / np.sqrt(hidden), weight_dtype)
    bias = jnp.asarray(rng.normal(size=num_experts), jnp.float32)
    return x, weight, bias


@functools.lru_cache
def compiled(avals, **static):
    """Compiles for arguments of these shapes and dtypes, once: a GPU's compiler takes long."""
    arguments = [None if aval is None else jax.ShapeDtypeStruct(*aval) for aval in avals]

    def call(x, weight, bias, token_mask):
        return routing.route(x, weight, bias, token_mask=token_mask, **static)

    options = None if jax.default_backend() == "cpu" else EAGER
    return jax.jit(call).lower(*arguments).compile(compiler_options=options)


def on_cpu(function, *arrays, **static):
    """Runs an oracle on the CPU, whatever the backend is."""
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [None if array is None else jnp.asarray(np.asarray(array)) for array in arrays]
        return jax.tree.map(np.asarray, function(*arrays, **static))


def poison(*like):
    """Fills the memory that the next results will take with NaN bits, and frees it again."""
    arrays = [jnp.full((leaf.nbytes,), 0xFF, jnp.uint8) for leaf in like for _ in range(4)]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


def run(x, weight, bias=None, token_mask=None, **static):
    """Runs it twice, the second time in poisoned memory; gives both results."""
    arguments = (x, weight, bias, token_mask)
    avals = tuple(None if array is None else (array.shape, array.dtype) for array in arguments)
    call = compiled(avals, **static)
    results = []
    for _ in range(2):
        out = call(*arguments)
        results.append([np.asarray(leaf) for leaf in out])
        del out
        poison(*results[0])
    return results


def units(count):
    return count * 2.0**-23


def assert_logits(x, weight, bias, logits):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    exact = x @ weight.T + (0 if bias is None else np.asarray(bias, np.float64))
    sizes = np.abs(x) @ np.abs(weight).T + (0 if bias is None else np.abs(np.asarray(bias)))
    assert np.all(np.abs(logits - exact) <= (x.shape[1] + 1) * 2.0**-24 * sizes)


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize(CASE_NAMES, cases_of_both())
def test_softmax_routes_are_those_of_softmax_topk_of_the_same_logits(
    num_tokens, hidden, num_experts, top_k, x_dtype, weight_dtype, renormalize
):
    rng = np.random.default_rng(num_tokens + hidden)
    x, weight, bias = draw(rng, num_tokens, hidden, num_experts, x_dtype, weight_dtype)
    bias = bias if renormalize else None
    mask = jnp.asarray(rng.uniform(size=num_tokens) < 0.8)
    first, again = run(
        x, weight, bias, token_mask=mask, top_k=top_k, renormalize=renormalize, scale=2.5
    )
    assert_same_bits(first, again)
    ids, weights, logits = first
    assert_logits(x, weight, bias, logits)
    expected_ids, expected = on_cpu(
        lambda logits, mask: routing.softmax_topk(
            logits, top_k, renormalize=renormalize, token_mask=mask
        ),
        logits,
        mask,
    )
    assert np.array_equal(ids, expected_ids)
    rtol = units((top_k if renormalize else num_experts) + 8)
    np.testing.assert_allclose(weights, 2.5 * expected, rtol=rtol, atol=0)


def assert_sigmoid_choice(ids, weights, logits, bias, top_k, groups, renormalize, scale):
    """Ids are jnp's wherever no two scores that matter are within a few units of each other."""
    num_groups, topk_groups = groups
    expected_ids, expected = on_cpu(
        lambda logits, bias: routing.sigmoid_topk(
            logits,
            top_k,
            correction_bias=bias,
            num_groups=num_groups,
            topk_groups=topk_groups,
            renormalize=renormalize,
            routed_scaling_factor=scale,
        ),
        logits,
        bias,
    )
    scores = on_cpu(jax.nn.sigmoid, logits).astype(np.float64)
    biased = scores + (0 if bias is None else np.asarray(bias, np.float64))
    # Neighbours anywhere in the order, so that a swap in a group's score counts as well.
    gaps = np.diff(np.sort(biased, axis=1), axis=1)
    clear = gaps.min(axis=1, initial=np.inf) > 4 * 2.0**-23
    assert clear.any() or num_groups > 1 or logits.shape[1] > 300
    assert np.array_equal(ids[clear], expected_ids[clear])
    np.testing.assert_allclose(weights[clear], expected[clear], rtol=units(top_k + 8), atol=0)
    # Of the others: what is chosen is as good as jnp's choice, and weighed for what it is.
    chosen = np.take_along_axis(biased, ids, 1)
    best = np.take_along_axis(biased, expected_ids, 1)
    if num_groups == topk_groups:
        np.testing.assert_allclose(chosen, best, rtol=0, atol=8 * 2.0**-23)
    own = np.take_along_axis(scores, ids, 1)
    own = own / (own.sum(1, keepdims=True) + 1e-20) if renormalize else own
    np.testing.assert_allclose(weights, scale * own, rtol=units(top_k + 8), atol=0)


@pytest.mark.parametrize(CASE_NAMES, cases_of_both())
def test_sigmoid_routes_are_those_of_sigmoid_topk_of_the_same_logits(
    num_tokens, hidden, num_experts, top_k, x_dtype, weight_dtype, renormalize
):
    rng = np.random.default_rng(num_tokens * hidden)
    x, weight, bias = draw(rng, num_tokens, hidden, num_experts, x_dtype, weight_dtype)
    bias = bias if renormalize else None
    first, again = run(
        x, weight, bias, top_k=top_k, scoring="sigmoid", renormalize=renormalize, scale=2.5
    )
    assert_same_bits(first, again)
    ids, weights, logits = first
    assert_logits(x, weight, None, logits)
    assert_sigmoid_choice(ids, weights, logits, bias, top_k, (1, 1), renormalize, 2.5)


both_backends = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


@both_backends
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "topk_groups", "top_k"),
    [(64, 8, 3, 6), (256, 8, 4, 8), (12, 4, 2, 5), (6, 6, 2, 2), (160, 32, 1, 5)],
)
def test_groups_limit_the_choice_as_in_sigmoid_topk(
    num_experts, num_groups, topk_groups, top_k, backend
):
    rng = np.random.default_rng(num_experts)
    x, weight, bias = draw(rng, 40, 128, num_experts)
    (ids, weights, logits), _ = run(
        x,
        weight,
        bias,
        top_k=top_k,
        scoring="sigmoid",
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    assert_sigmoid_choice(ids, weights, logits, bias, top_k, (num_groups, topk_groups), True, 1.0)
    size = num_experts // num_groups
    assert all(len(np.unique(row // size)) <= topk_groups for row in ids)


@both_backends
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_tokens", [1, 11])
def test_equal_scores_go_to_the_lowest_expert(num_tokens, scoring, backend):
    rng = np.random.default_rng(3)
    x, weight, _ = draw(rng, num_tokens, 64, 7)
    weight = jnp.concatenate([weight] * 20)  # expert e ties with e + 7, e + 14, ...
    (ids, weights, logits), _ = run(x, weight, top_k=9, scoring=scoring)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :9]
    assert np.array_equal(ids, order)
    np.testing.assert_allclose(weights, 1 / 9, rtol=units(17))


@both_backends
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_tokens", [1, 12])
def test_a_nan_shows_in_its_own_token_and_a_padding_token_gets_the_padding_route(
    num_tokens, scoring, backend
):
    rng = np.random.default_rng(4)
    x, weight, bias = draw(rng, num_tokens, 96, 24)
    (clean_ids, clean, _), _ = run(x, weight, bias, top_k=4, scoring=scoring)
    bad = x.at[0, 5].set(jnp.nan)
    (ids, weights, logits), _ = run(bad, weight, bias, top_k=4, scoring=scoring)
    assert np.isnan(logits[0]).all()
    assert np.isnan(weights[0]).all()
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert np.array_equal(ids[1:], clean_ids[1:])
    assert np.array_equal(weights[1:], clean[1:])
    mask = jnp.arange(num_tokens) != 0
    (ids, weights, _), _ = run(bad, weight, bias, top_k=4, scoring=scoring, token_mask=mask)
    assert ids[0].tolist() == [-1] * 4
    assert weights[0].tolist() == [0.0] * 4
    assert np.array_equal(ids[1:], clean_ids[1:])


@both_backends
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_tokens", "num_joined"), [(1, 1), (12, 2), (3, 8)])
def test_every_token_goes_to_the_joined_experts_with_weight_1(
    num_tokens, num_joined, scoring, backend
):
    rng = np.random.default_rng(num_joined)
    x, weight, bias = draw(rng, num_tokens, 96, 40)
    x = x.at[0, 3].set(jnp.nan)
    mask = jnp.arange(num_tokens) != 2
    options = {"top_k": 8, "scoring": scoring, "scale": 2.5}
    plain, _ = run(x, weight, bias, token_mask=mask, **options)
    first, again = run(x, weight, bias, token_mask=mask, num_joined=num_joined, **options)
    assert_same_bits(first, again)
    ids, weights, logits = first
    assert_same_bits((ids[:, :8].copy(), weights[:, :8].copy(), logits), plain)
    assert ids[:, 8:].tolist() == [list(range(40, 40 + num_joined))] * num_tokens
    assert weights[:, 8:].tolist() == [[1.0] * num_joined] * num_tokens
    expected, ones, _ = on_cpu(
        lambda x, w, b, m: routing.route_reference(
            x, w, b, token_mask=m, num_joined=num_joined, **options
        ),
        x,
        weight,
        bias,
        mask,
    )
    assert np.array_equal(ids[:, 8:], expected[:, 8:])
    assert np.array_equal(weights[:, 8:], ones[:, 8:])


@both_backends
def test_infinite_logits_and_biases_are_the_largest_and_smallest_scores(backend):
    weight = (
        jnp.zeros((6, 16), jnp.float32)
        .at[:, 0]
        .set(jnp.asarray([1.0, -jnp.inf, 2.0, jnp.inf, 0.5, -jnp.inf]))
    )
    x = jnp.zeros((1, 16), jnp.float32).at[0, 0].set(1.0)
    # 0 * inf would be NaN; only the first column is infinite and it meets a 1.
    (ids, weights, logits), _ = run(x, weight, top_k=6)
    assert ids[0].tolist() == [3, 2, 0, 4, 1, 5]
    assert weights[0].tolist() == [1.0, 0, 0, 0, 0, 0]
    assert np.array_equal(logits[0], [1, -np.inf, 2, np.inf, 0.5, -np.inf])
    bias = jnp.asarray([0.0, jnp.inf, 0, 0, -jnp.inf, 0], jnp.float32)
    (ids, _, _), _ = run(x, weight, bias, top_k=6, scoring="sigmoid")
    assert ids[0].tolist() == [1, 3, 2, 0, 5, 4]
    (_, weights, _), _ = run(x, weight, bias.at[2].set(jnp.nan), top_k=6, scoring="sigmoid")
    assert np.isnan(weights).all()


@both_backends
def test_a_token_has_the_same_bits_alone_and_among_others(backend):
    rng = np.random.default_rng(5)
    x, weight, bias = draw(rng, 21, 2880, 96)
    (ids, weights, logits), _ = run(x, weight, bias, top_k=5)
    for token in (0, 7, 20):
        (one, one_weights, one_logits), _ = run(x[token : token + 1], weight, bias, top_k=5)
        assert np.array_equal(logits[token], one_logits[0])
        assert np.array_equal(ids[token], one[0])
        assert np.array_equal(weights[token], one_weights[0])


def test_no_tokens_give_empty_results():
    x, weight, _ = draw(np.random.default_rng(0), 0, 32, 8)
    ids, weights, logits = routing.route(x, weight, top_k=2)
    assert (ids.shape, weights.shape, logits.shape) == ((0, 2), (0, 2), (0, 8))
    assert (ids.dtype, weights.dtype, logits.dtype) == (jnp.int32, jnp.float32, jnp.float32)
    ids, weights, _ = routing.route(x, weight, top_k=2, num_joined=3)
    assert (ids.shape, weights.shape) == ((0, 5), (0, 5))


def test_vmap_over_tokens_is_one_call_with_more_tokens():
    rng = np.random.default_rng(6)
    x, weight, bias = draw(rng, 6, 64, 16)
    mask = jnp.asarray([True, False] * 3)
    flat = routing.route(x, weight, bias, top_k=3, token_mask=mask)
    mapped = jax.vmap(lambda x, m: routing.route(x, weight, bias, top_k=3, token_mask=m))(
        x.reshape(2, 3, 64), mask.reshape(2, 3)
    )
    for a, b in zip(flat, mapped, strict=True):
        assert np.array_equal(a, b.reshape(a.shape))
    with pytest.raises(ValueError, match="weights of route are mapped"):
        jax.vmap(lambda w: routing.route(x, w, top_k=3))(jnp.stack([weight, weight]))


def test_it_works_inside_shard_map():
    rng = np.random.default_rng(7)
    x, weight, bias = draw(rng, 8, 64, 16)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("tokens",))
    rows = PartitionSpec("tokens")
    sharded = jax.jit(
        jax.shard_map(
            lambda x, w, b: routing.route(x, w, b, top_k=3),
            mesh=mesh,
            in_specs=(rows, PartitionSpec(), PartitionSpec()),
            out_specs=(rows, rows, rows),
        )
    )(x, weight, bias)
    for a, b in zip(sharded, routing.route(x, weight, bias, top_k=3), strict=True):
        assert np.array_equal(a, b)


def test_differentiating_says_what_to_differentiate():
    x, weight, _ = draw(np.random.default_rng(8), 2, 32, 8, "float32", "float32")
    with pytest.raises(NotImplementedError, match="route_reference"):
        jax.grad(lambda w: routing.route(x, w, top_k=2)[1].sum())(weight)
    gradient = jax.grad(lambda w: routing.route_reference(x, w, top_k=2)[1][:, 0].sum())(weight)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": jnp.zeros((2, 24))}, ValueError, "hidden must be a positive multiple of 16"),
        ({"x": jnp.zeros(32)}, ValueError, r"x has shape \(32,\)"),
        ({"x": jnp.zeros((2, 32), jnp.int32)}, TypeError, "x has dtype int32"),
        ({"weight": jnp.zeros((8, 48))}, ValueError, "rows must have the 32 columns of x"),
        ({"weight": jnp.zeros((1025, 32))}, ValueError, r"within \[1, 1024\]"),
        ({"weight": [1.0]}, TypeError, "weight is a list"),
        ({"top_k": 9}, ValueError, r"top_k is 9; it must be within \[1, 8\]"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"num_joined": -1}, ValueError, r"num_joined is -1; it must be within \[0, 14\]"),
        ({"num_joined": 15}, ValueError, r"num_joined is 15; it must be within \[0, 14\], for top"),
        (
            {"weight": jnp.zeros((1023, 32)), "num_joined": 2},
            ValueError,
            r"num_joined is 2; it must be within \[0, 1\], for num_experts 1023 of at most 1024",
        ),
        ({"bias": jnp.zeros(7)}, ValueError, r"bias has shape \(7,\)"),
        ({"bias": jnp.zeros(8, jnp.bfloat16)}, TypeError, "bias has dtype bfloat16"),
        ({"scoring": "tanh"}, ValueError, "scoring is 'tanh'"),
        ({"num_groups": 2}, ValueError, "num_groups is 2 and topk_groups 1"),
        ({"scoring": "sigmoid", "num_groups": 3}, ValueError, "must divide the 8 experts"),
        ({"token_mask": jnp.ones(3, bool)}, ValueError, r"token_mask is bool\[3\]"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"x": jnp.zeros((2, 32)), "weight": jnp.zeros((8, 32)), "top_k": 2, **change}
    with pytest.raises(error, match=message):
        routing.route(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_one_captured_executable_serves_a_hundred_inputs(num_tokens):
    rng = np.random.default_rng(9)
    x, weight, bias = draw(rng, num_tokens, 2048, 128)

    def steps(x, w, b):
        # Several calls, so that they follow each other in one graph.
        return [routing.route(x * scale, w, b, top_k=8) for scale in (1.0, 0.5, 2.0)]

    lowered = jax.jit(steps).lower(x, weight, bias)
    captured, eager = (lowered.compile(compiler_options=o) for o in (CAPTURED, EAGER))
    for _ in range(100):
        x = jnp.asarray(rng.normal(size=x.shape), x.dtype)
        for a, b in zip(
            jax.tree.leaves(captured(x, weight, bias)),
            jax.tree.leaves(eager(x, weight, bias)),
            strict=True,
        ):
            assert np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
