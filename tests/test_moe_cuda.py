"""The MoE op on a GPU: against the fp32 oracle, against itself, eager and captured.

Tolerances are relative Frobenius errors. Both recipes differ from the oracle by the order of fp32
sums (about 1e-6) and by the rounding of the output, at most 2^-9 of an element in bf16. w4a16 also
rounds the intermediate to 16 bits after those sums: one in some thousand elements rounds the other
way, by 2^-8. nvfp4 quantizes it: an element that lies within 1e-6 of a boundary between two E2M1
values moves by up to half of its size. With 8 boundaries that is one element in 10^4 or fewer:
sqrt(1e-4) / 2 = 5e-3, and with the output's rounding less than 1e-2.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_inputs import random_tokens, random_weights

from jax_b12x import moe
from jax_b12x.moe import reference

pytestmark = pytest.mark.gpu

TOLERANCE = {"w4a16": 5e-3, "nvfp4": 1e-2}
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}
EAGER = {"xla_gpu_graph_min_graph_size": 1 << 30}

# hidden, intermediate, experts, top_k
SMALL = (256, 128, 8, 3)
RAGGED = (2896, 720, 6, 4)  # no multiple of a tile in any direction
QWEN = (2048, 768, 32, 8)
WIDE = (6144, 256, 24, 8)
MANY = (64, 64, 1024, 16)


def make_plan(recipe, x, weights, top_k, implementation, activation=moe.SILU):
    return moe.plan(
        recipe,
        num_tokens=x.shape[0],
        hidden=weights.hidden,
        intermediate=weights.intermediate,
        num_experts=weights.num_experts,
        top_k=top_k,
        dtype=x.dtype,
        activation=activation,
        weight_format=weights.format,
        implementation=implementation,
    )


def poison(*shapes_and_dtypes):
    """Fills the memory that the next results will take with NaN bits, and frees it again."""
    arrays = [
        jnp.full((np.prod(shape, dtype=int) * jnp.dtype(dtype).itemsize,), 0xFF, jnp.uint8)
        for shape, dtype in shapes_and_dtypes
        for _ in range(4)
    ]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


def run(plan, x, weights, ids, route, options=EAGER, times=1):
    """Compiles and runs the op, its results in poisoned memory; gives the result of every run."""
    call = jax.jit(lambda x, w, i, r: moe.fused_moe(x, w, i, r, plan=plan))
    compiled = call.lower(x, weights, ids, route).compile(compiler_options=options)
    results = []
    for _ in range(times):
        poison((x.shape, x.dtype), ((plan.scratch_bytes,), jnp.uint8))
        results.append(np.asarray(compiled(x, weights, ids, route)))
    return results


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize(
    ("shape", "num_tokens", "dtype", "activation", "bias"),
    [
        (SMALL, 1, "bfloat16", moe.SILU, False),
        (SMALL, 5, "float16", moe.SWIGLU_OAI, True),
        (SMALL, 64, "bfloat16", moe.SILU, True),
        (RAGGED, 1, "bfloat16", moe.SWIGLU_OAI, True),
        (RAGGED, 11, "float16", moe.SILU, False),
        (QWEN, 1, "bfloat16", moe.SILU, False),
        (QWEN, 8, "float16", moe.SILU, False),
        (QWEN, 64, "bfloat16", moe.SILU, False),
        (WIDE, 1, "bfloat16", moe.SILU, False),
        (WIDE, 17, "bfloat16", moe.SWIGLU_OAI, False),
        (MANY, 64, "bfloat16", moe.SILU, False),
    ],
)
def test_op_equals_the_oracle_and_fused_equals_split_bit_for_bit(
    recipe, shape, num_tokens, dtype, activation, bias
):
    hidden, intermediate, num_experts, top_k = shape
    rng = np.random.default_rng(num_tokens + hidden)
    weights = random_weights(
        rng, hidden=hidden, intermediate=intermediate, num_experts=num_experts, bias=bias
    )
    x, ids, route = random_tokens(
        rng,
        num_tokens=num_tokens,
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        dtype=dtype,
    )
    expected = jax.jit(lambda *a: reference.moe(*a, recipe=recipe, activation=activation))(
        x, weights, ids, route
    )
    fused = make_plan(recipe, x, weights, top_k, "fused", activation)
    prepared = weights.prepare(fused)
    first, again, replayed = run(fused, x, prepared, ids, route, CAPTURED, times=3)
    assert relative_error(first, expected) <= TOLERANCE[recipe]
    split = make_plan(recipe, x, weights, top_k, "split", activation)
    for other in (again, replayed, *run(split, x, prepared, ids, route, EAGER, times=2)):
        assert np.array_equal(first.view(np.uint16), other.view(np.uint16))


@pytest.mark.parametrize("num_tokens", [1, 24])
@pytest.mark.parametrize("factor", [2.0**18, 2.0**-40])
def test_large_and_small_activations_keep_their_precision(num_tokens, factor):
    # Kernels move exponents about where an expert has one token.
    rng = np.random.default_rng(9)
    weights = random_weights(rng, hidden=256, intermediate=128, num_experts=8)
    x, ids, route = random_tokens(
        rng, num_tokens=num_tokens, hidden=256, num_experts=8, top_k=3, dtype="bfloat16"
    )
    x = x * jnp.asarray(factor, x.dtype)
    expected = reference.moe(x, weights, ids, route)
    plan = make_plan("w4a16", x, weights, 3, "fused")
    (actual,) = run(plan, x, weights.prepare(plan), ids, route)
    assert relative_error(actual, expected) <= TOLERANCE["w4a16"]


@pytest.mark.parametrize("implementation", ["fused", "split"])
def test_mxfp4_weights_equal_the_oracle(implementation):
    rng = np.random.default_rng(5)
    weights = random_weights(
        rng, hidden=288, intermediate=160, num_experts=8, weight_format="mxfp4", bias=True
    )
    x, ids, route = random_tokens(
        rng, num_tokens=6, hidden=288, num_experts=8, top_k=3, dtype="bfloat16"
    )
    expected = reference.moe(x, weights, ids, route, activation=moe.SWIGLU_OAI)
    plan = make_plan("w4a16", x, weights, 3, implementation, moe.SWIGLU_OAI)
    (actual,) = run(plan, x, weights.prepare(plan), ids, route)
    assert relative_error(actual, expected) <= TOLERANCE["w4a16"]


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
def test_many_tokens_take_the_dynamic_path_and_equal_the_oracle(recipe):
    rng = np.random.default_rng(6)
    weights = random_weights(rng, hidden=256, intermediate=128, num_experts=8)
    x, ids, route = random_tokens(
        rng, num_tokens=150, hidden=256, num_experts=8, top_k=3, dtype="bfloat16"
    )
    plan = make_plan(recipe, x, weights, 3, None)
    assert plan.implementation == "dynamic"
    expected = reference.moe(x, weights, ids, route, recipe=recipe)
    (actual,) = run(plan, x, weights.prepare(plan), ids, route)
    assert relative_error(actual, expected) <= TOLERANCE[recipe]


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
def test_all_tokens_on_one_expert_are_right(recipe):
    rng = np.random.default_rng(7)
    weights = random_weights(rng, hidden=256, intermediate=128, num_experts=8)
    x, ids, route = random_tokens(
        rng, num_tokens=64, hidden=256, num_experts=8, top_k=2, dtype="bfloat16"
    )
    ids = jnp.broadcast_to(jnp.asarray([5, 2], jnp.int32), ids.shape)
    expected = reference.moe(x, weights, ids, route, recipe=recipe)
    plan = make_plan(recipe, x, weights, 2, "fused")
    (actual,) = run(plan, x, weights.prepare(plan), ids, route)
    assert relative_error(actual, expected) <= TOLERANCE[recipe]


@pytest.mark.parametrize("implementation", ["fused", "split"])
@pytest.mark.parametrize("num_tokens", [1, 6, 40])
def test_ids_outside_the_experts_contribute_nothing_and_a_nan_stays_in_its_row(
    implementation, num_tokens
):
    rng = np.random.default_rng(8)
    weights = random_weights(rng, hidden=256, intermediate=128, num_experts=8)
    x, ids, route = random_tokens(
        rng, num_tokens=num_tokens, hidden=256, num_experts=8, top_k=4, dtype="bfloat16"
    )
    outside = rng.choice([-1, 8, 2**31 - 1, -(2**31)], ids.shape)
    drop = rng.uniform(size=ids.shape) < 0.4
    bad_ids = jnp.where(drop, outside, ids).astype(jnp.int32)
    bad_route = jnp.where(drop, jnp.nan, route)
    if num_tokens > 1:
        x = x.at[1, 7].set(jnp.nan)
        bad_ids = bad_ids.at[0].set(-1).at[1, 0].set(3)
        bad_route = bad_route.at[1, 0].set(0.5)
    expected = np.asarray(reference.moe(x, weights, bad_ids, bad_route), np.float32)
    plan = make_plan("w4a16", x, weights, 4, implementation)
    (actual,) = run(plan, x, weights.prepare(plan), bad_ids, bad_route)
    actual = np.asarray(actual, np.float32)
    assert np.array_equal(np.isnan(actual), np.isnan(expected))
    if num_tokens > 1:
        assert np.isnan(actual[1]).all()
        assert not actual[0].any()
    finite = ~np.isnan(expected)
    if finite.any() and np.abs(expected[finite]).any():
        assert relative_error(actual[finite], expected[finite]) <= TOLERANCE["w4a16"]


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 6, 33])
def test_one_captured_executable_serves_a_hundred_inputs_and_routings(recipe, num_tokens):
    hidden, intermediate, num_experts, top_k = 512, 256, 32, 4
    rng = np.random.default_rng(9)
    weights = random_weights(rng, hidden=hidden, intermediate=intermediate, num_experts=num_experts)
    draw = {
        "num_tokens": num_tokens,
        "hidden": hidden,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    x, ids, route = random_tokens(rng, **draw, dtype="bfloat16")
    fused = make_plan(recipe, x, weights, top_k, "fused")
    split = make_plan(recipe, x, weights, top_k, "split")
    prepared = weights.prepare(fused)

    def both(x, w, i, r):
        return moe.fused_moe(x, w, i, r, plan=fused), moe.fused_moe(x, w, i, r, plan=split)

    lowered = jax.jit(both).lower(x, prepared, ids, route)
    captured = lowered.compile(compiler_options=CAPTURED)
    eager = lowered.compile(compiler_options=EAGER)
    for _ in range(100):
        x, ids, route = random_tokens(rng, **draw, dtype="bfloat16")
        ids = jnp.where(rng.uniform(size=ids.shape) < 0.1, -1, ids)
        results = [*captured(x, prepared, ids, route), *eager(x, prepared, ids, route)]
        first = np.asarray(results[0]).view(np.uint16)
        assert all(np.array_equal(first, np.asarray(r).view(np.uint16)) for r in results[1:])


def test_experts_beyond_two_gigabytes_are_found():
    """w13 passes 2^32 bytes, and only the last experts, which lie beyond, are routed to."""
    hidden, intermediate, live = 4096, 1408, 4
    rng = np.random.default_rng(10)
    weights = random_weights(rng, hidden=hidden, intermediate=intermediate, num_experts=live)
    x, ids, route = random_tokens(
        rng, num_tokens=2, hidden=hidden, num_experts=live, top_k=2, dtype="bfloat16"
    )
    plan = make_plan("w4a16", x, weights, 2, "fused")
    prepared = weights.prepare(plan)
    (expected,) = run(plan, x, prepared, ids, route)

    num_experts = 700
    first_live = num_experts - live

    def at_the_end(array):
        if array.ndim == 0:
            return array
        padding = jnp.zeros((first_live, *array.shape[1:]), array.dtype)
        return jnp.concatenate([padding, array])

    large = jax.tree.map(at_the_end, prepared)
    assert large.w13.nbytes > 2**32
    assert large.w2.nbytes > 2**31
    # The same geometry, so that sums have the same order.
    large_plan = dataclasses.replace(plan, num_experts=num_experts)
    (actual,) = run(large_plan, x, large, ids + first_live, route)
    assert np.array_equal(actual.view(np.uint16), expected.view(np.uint16))
