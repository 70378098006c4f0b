"""``fused_moe`` against the oracle, and under JAX's transformations."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from moe_inputs import BLOCK, random_tokens, random_weights

import jax_b12x
from jax_b12x import _native, moe

IMPLEMENTATIONS = ("fused", "split", "dynamic")
FORMATS = [("w4a16", "nvfp4"), ("w4a16", "mxfp4"), ("nvfp4", "nvfp4")]
NUM_EXPERTS, TOP_K = 6, 3

# Kernels and oracle add the same exact products in different orders. With w4a16 that may flip the
# rounding of an intermediate or of an output, each by one unit of x's dtype in relative size; in
# float32 what is left is the order itself, about sqrt(n) roundings of 2**-24.
#
# With nvfp4 a flipped element of the intermediate moves by a whole step. Sums of n = 256 products
# differ by at most eps = n * 2**-24 * sqrt(n) relative to their size, which is up to 6 steps of at
# least 0.5, so at most a share of 24 * eps = 0.6% of the elements flips; a step is at most a third
# of its element: sqrt(0.006) / 3 = 2.6e-2.
TOLERANCE = {
    ("w4a16", "float32"): 256**0.5 * 2**-22,
    ("w4a16", "bfloat16"): 2 * 2**-8,
    ("w4a16", "float16"): 2 * 2**-11,
    ("nvfp4", "float32"): 2.6e-2,
    ("nvfp4", "bfloat16"): 2.6e-2,
    ("nvfp4", "float16"): 2.6e-2,
}


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def plan_for(x, weights, ids, recipe, activation=moe.SILU, implementation=None, isa="auto"):
    made = moe.plan(
        recipe,
        num_tokens=x.shape[0],
        hidden=x.shape[1],
        intermediate=weights.intermediate,
        num_experts=weights.num_experts,
        top_k=ids.shape[1],
        dtype=x.dtype,
        activation=activation,
        weight_format=weights.format,
        implementation=implementation,
    )
    return dataclasses.replace(made, host_isa=isa)


def run(x, weights, ids, topk_weights, **plan_arguments):
    made = plan_for(x, weights, ids, **plan_arguments)
    return jax.jit(functools.partial(moe.fused_moe, plan=made))(x, weights, ids, topk_weights)


def oracle(x, weights, ids, topk_weights, recipe, activation=moe.SILU):
    call = functools.partial(moe.reference.moe, recipe=recipe, activation=activation)
    return jax.jit(call)(x, weights, ids, topk_weights)


def inputs(
    rng, *, recipe="w4a16", weight_format="nvfp4", num_tokens=5, dtype=jnp.bfloat16, hidden=256,
    intermediate=128, bias=False,
):  # fmt: skip
    del recipe
    weights = random_weights(
        rng,
        hidden=hidden,
        intermediate=intermediate,
        num_experts=NUM_EXPERTS,
        weight_format=weight_format,
        bias=bias,
    )
    x, ids, topk_weights = random_tokens(
        rng,
        num_tokens=num_tokens,
        hidden=hidden,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        dtype=dtype,
    )
    return x, weights, ids, topk_weights


@pytest.fixture
def rng():
    return np.random.default_rng()


# Multiples of the kernels' tiles, odd multiples of the block, and the smallest sizes there are.
SHAPES = [(256, 128), (336, 112), None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("recipe", "weight_format"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=["even", "odd", "smallest"])
def test_every_implementation_agrees_with_the_oracle_and_bit_for_bit_with_the_others(
    rng, shape, recipe, weight_format, dtype
):
    block = BLOCK[weight_format]
    hidden, intermediate = shape or (block, block)
    hidden, intermediate = hidden // block * block, intermediate // block * block
    activation = moe.SILU if shape == (256, 128) else moe.SWIGLU_OAI
    case = inputs(
        rng,
        weight_format=weight_format,
        dtype=dtype,
        hidden=hidden,
        intermediate=intermediate,
        bias=shape != (256, 128),
        num_tokens=int(rng.integers(1, 24)),
    )
    expected = oracle(*case, recipe=recipe, activation=activation)
    results = [
        run(*case, recipe=recipe, activation=activation, implementation=name)
        for name in IMPLEMENTATIONS
    ]
    assert results[0].dtype == case[0].dtype
    assert relative_error(results[0], expected) <= TOLERANCE[recipe, dtype]
    for other in results[1:]:
        np.testing.assert_array_equal(bits(results[0]), bits(other))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("recipe", "weight_format"), FORMATS)
def test_every_instruction_set_gives_the_same_bits(rng, recipe, weight_format, dtype):
    # 20 tokens of 3 routes to 6 experts: some experts meet one token, some many.
    case = inputs(
        rng, weight_format=weight_format, dtype=dtype, hidden=352, intermediate=96, num_tokens=20
    )
    few = (case[0][:1], case[1], case[2][:1], case[3][:1])
    isas = _native.host().host_isas()
    for arguments in (case, few):
        first, *others = (run(*arguments, recipe=recipe, isa=isa) for isa in isas)
        assert np.isfinite(np.asarray(first, np.float32)).all()
        for other in others:
            np.testing.assert_array_equal(bits(first), bits(other))


def test_slabs_of_the_dynamic_path_do_not_change_a_bit(rng):
    case = inputs(rng, num_tokens=70)
    x, weights, ids, topk_weights = case
    made = plan_for(x, weights, ids, "w4a16", implementation="dynamic")
    whole = moe.fused_moe(*case, plan=made)
    halves = [
        run(x[rows], weights, ids[rows], topk_weights[rows], recipe="w4a16")
        for rows in (slice(0, 33), slice(33, 70))
    ]
    np.testing.assert_array_equal(bits(whole), bits(np.concatenate(halves)))


def test_more_tokens_than_a_slab_agree_with_the_oracle(rng):
    case = inputs(rng, num_tokens=1100, hidden=32, intermediate=32)
    made = plan_for(*case[:3], "w4a16")
    assert dict(made.geometry)["slab_tokens"] < 1100
    expected = oracle(*case, recipe="w4a16")
    assert relative_error(moe.fused_moe(*case), expected) <= TOLERANCE["w4a16", "bfloat16"]


def one_hot_weights(size):
    """Returns one expert whose products have a single term: the sums are exact in any order."""
    one = np.zeros((size, size // 2), np.uint8)  # code 2 is 1.0
    one[np.arange(size), np.arange(size) // 2] = np.where(np.arange(size) % 2, 0x20, 0x02)
    ones = np.full((1, 2 * size, size // 16), 0x38, np.uint8)  # 1.0 in E4M3
    return functools.partial(
        moe.ExpertWeights.from_arrays,
        np.concatenate([one, np.zeros_like(one)])[None],
        ones,
        one[None],
        ones[:, :size],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nvfp4_quantizes_activations_bit_for_bit_as_the_oracle_does(rng, dtype):
    size, tokens = 64, 64
    reach = 12 if dtype == "float16" else 40
    exponents = rng.integers(-reach, reach, (tokens, size // 16, 1)).repeat(16, axis=2)
    x = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0], (tokens, size // 16, 16))
    x = np.where(rng.uniform(size=x.shape) < 0.5, x, rng.normal(size=x.shape) * 3)
    x = (x * rng.choice([-1, 1], x.shape) * 2.0**exponents).reshape(tokens, size)
    x[0, 0] = np.inf
    x[1, 20] = -np.inf
    x[2, :16] = 0
    weights = one_hot_weights(size)(
        w13_input_scale=np.float32(2.0 ** rng.integers(-6, 6) * rng.uniform(1, 2)),
        w2_input_scale=np.float32(2.0 ** rng.integers(-6, 6) * rng.uniform(1, 2)),
    )
    # With alpha 0 the sigmoid is exactly one half and with zero up rows h is gate / 2.
    activation = moe.Activation("swiglu_oai", alpha=0.0, limit=1e30)
    case = (
        jnp.asarray(x, dtype),
        weights,
        jnp.zeros((tokens, 1), jnp.int32),
        jnp.ones((tokens, 1), jnp.float32),
    )
    expected = np.asarray(oracle(*case, recipe="nvfp4", activation=activation), np.float32)
    actual = np.asarray(run(*case, recipe="nvfp4", activation=activation), np.float32)
    # XLA may flush subnormal results to zero on CPU; zeros may differ in sign.
    tiny = np.abs(expected) < 2.0**-126
    np.testing.assert_array_equal(np.where(tiny, 0, actual), np.where(tiny, 0, expected))
    assert np.count_nonzero(expected) > tokens


def test_results_do_not_depend_on_what_out_and_scratch_held(rng):
    # Donated NaNs, a warm allocator full of them, and ten runs: the same bits each time.
    case = inputs(rng, recipe="nvfp4", num_tokens=9, hidden=272, intermediate=48)
    call = jax.jit(functools.partial(moe.fused_moe, recipe="nvfp4"))
    first = bits(call(*case[:1], *case[1:]))
    for _ in range(10):
        poison = [jnp.full((size,), jnp.nan) for size in (1 << 10, 1 << 13, 1 << 16)]
        jax.block_until_ready(poison)
        del poison
        np.testing.assert_array_equal(bits(call(*case)), first)


def test_zero_tokens_give_an_empty_result(rng):
    x, weights, ids, topk_weights = inputs(rng)
    out = jax.jit(moe.fused_moe)(x[:0], weights, ids[:0], topk_weights[:0])
    assert out.shape == (0, 256)
    assert out.dtype == x.dtype


def test_vmap_over_tokens_is_one_call_with_more_tokens(rng):
    x, weights, ids, topk_weights = inputs(rng, num_tokens=12)
    batched = [array.reshape(4, 3, -1) for array in (x, ids, topk_weights)]
    mapped = jax.vmap(lambda x, i, t: moe.fused_moe(x, weights, i, t))
    out = jax.jit(mapped)(*batched)
    np.testing.assert_array_equal(
        bits(out.reshape(12, -1)), bits(moe.fused_moe(x, weights, ids, topk_weights))
    )
    assert str(jax.make_jaxpr(mapped)(*batched)).count("b12x_workspace_call[") == 1


@pytest.mark.parametrize(("batch", "num_tokens"), [(0, 3), (2, 0)])
def test_vmap_over_nothing_gives_nothing_of_the_right_shape(rng, batch, num_tokens):
    x, weights, ids, topk_weights = inputs(rng, num_tokens=3)
    empty = [jnp.zeros((batch, num_tokens, *a.shape[1:]), a.dtype) for a in (x, ids, topk_weights)]
    out = jax.vmap(lambda x, i, t: moe.fused_moe(x, weights, i, t))(*empty)
    assert out.shape == (batch, num_tokens, x.shape[1])


def test_vmap_with_the_same_routes_for_all_repeats_them(rng):
    x, weights, ids, topk_weights = inputs(rng, num_tokens=6)
    out = jax.vmap(moe.fused_moe, in_axes=(0, None, None, None))(
        x.reshape(2, 3, -1), weights, ids[:3], topk_weights[:3]
    )
    expected = moe.fused_moe(
        x, weights, jnp.tile(ids[:3], (2, 1)), jnp.tile(topk_weights[:3], (2, 1))
    )
    np.testing.assert_array_equal(bits(out.reshape(6, -1)), bits(expected))


def test_vmap_over_weights_says_that_it_does_not_work(rng):
    x, weights, ids, topk_weights = inputs(rng)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weights)
    with pytest.raises(ValueError, match="weights are mapped by vmap; fused_moe works under vmap"):
        jax.vmap(moe.fused_moe, in_axes=(None, 0, None, None))(x, stacked, ids, topk_weights)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd], ids=["grad", "jacfwd"])
def test_differentiation_says_that_the_op_is_inference_only(rng, transform):
    x, weights, ids, topk_weights = inputs(rng, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="fused_moe is inference-only"):
        transform(lambda x: moe.fused_moe(x, weights, ids, topk_weights).sum())(x)


def test_shard_map_over_tokens_gives_the_same_bits(rng):
    x, weights, ids, topk_weights = inputs(rng, num_tokens=8)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = P("data", None)
    sharded = jax.shard_map(
        moe.fused_moe, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=rows
    )
    np.testing.assert_array_equal(
        bits(jax.jit(sharded)(x, weights, ids, topk_weights)),
        bits(moe.fused_moe(x, weights, ids, topk_weights)),
    )


def test_exported_program_gives_the_same_bits_after_a_round_trip(rng):
    x, weights, ids, topk_weights = inputs(rng)

    def layer(x, ids, topk_weights):
        return moe.fused_moe(x, weights, ids, topk_weights)

    stable = jax.export.DisabledSafetyCheck.custom_call(moe.TARGET)
    exported = jax.export.export(jax.jit(layer), disabled_checks=[stable])(x, ids, topk_weights)
    stored = exported.serialize()
    jax_b12x.register()
    out = jax.export.deserialize(stored).call(x, ids, topk_weights)
    np.testing.assert_array_equal(bits(out), bits(layer(x, ids, topk_weights)))


_CACHED_PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
hits = []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("compilation_cache/cache_hits") else None)
sys.path.insert(0, sys.argv[2])
from moe_inputs import random_tokens, random_weights
from jax_b12x import moe
rng = np.random.default_rng(7)
weights = random_weights(rng, hidden=64, intermediate=32, num_experts=4)
x, ids, t = random_tokens(rng, num_tokens=3, hidden=64, num_experts=4, top_k=2, dtype=jnp.float32)
@jax.jit
def layer_under_test(x, weights, ids, t):
    return moe.fused_moe(x, weights, ids, t)
before = len(hits)
out = layer_under_test(x, weights, ids, t)
print(len(hits) - before, np.asarray(out).tobytes().hex())
"""


def test_program_from_the_persistent_compilation_cache_gives_the_same_bits(tmp_path):
    outputs = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", _CACHED_PROGRAM, str(tmp_path), os.path.dirname(__file__)],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        outputs.append(process.stdout.split())
    assert outputs[0][0] == "0", "the first process compiles"
    assert outputs[1][0] == "1", "the second one finds the program in the cache"
    assert outputs[0][1] == outputs[1][1]


def test_many_forced_host_devices_run_at_once():
    # Each device's call schedules helpers on the pool that the calls themselves occupy.
    program = """
import jax, jax.numpy as jnp, numpy as np, sys
sys.path.insert(0, sys.argv[1])
from moe_inputs import random_tokens, random_weights
from jax.sharding import PartitionSpec as P
from jax_b12x import moe
rng = np.random.default_rng(7)
w = random_weights(rng, hidden=256, intermediate=128, num_experts=4)
x, i, t = random_tokens(rng, num_tokens=32, hidden=256, num_experts=4, top_k=2, dtype=jnp.float32)
rows = P("data", None)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
f = jax.jit(jax.shard_map(moe.fused_moe, mesh=mesh, in_specs=(rows, P(), rows, rows),
                          out_specs=rows))
expected = np.asarray(moe.fused_moe(x, w, i, t))
for _ in range(5):
    np.testing.assert_array_equal(np.asarray(f(x, w, i, t)), expected)
print("done")
"""
    process = subprocess.run(
        [sys.executable, "-c", program, os.path.dirname(__file__)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "64"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.stdout.split() == ["done"], process.stderr
