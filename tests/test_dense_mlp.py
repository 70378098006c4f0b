"""``moe.dense_mlp`` against its ``jnp`` meaning in fp32.

Tolerances are relative Frobenius errors. Both sides round the same numbers to 16 bits twice, after
fp32 sums that differ by about 1e-6: an element in some hundred rounds the other way, by 2^-8 (bf16)
of itself. sqrt(1/100) * 2^-8 is 4e-4 for h and for the output each; 2e-3 leaves a margin. fp16 has
three bits more, and twice as many elements round the other way for each bit. fp32 differs by the
order of the sums alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jax_b12x import moe
from jax_b12x.moe import reference

TOLERANCE = {"bfloat16": 2e-3, "float16": 1e-3, "float32": 2e-6}
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}
EAGER = {"xla_gpu_graph_min_graph_size": 1 << 30}

# num_tokens, hidden, intermediate, dtype, activation, biases and a gate
CASES = [
    (1, 64, 32, "bfloat16", moe.SILU, False),
    (3, 16, 16, "float16", moe.SWIGLU_OAI, True),
    (5, 2880, 192, "bfloat16", moe.SWIGLU_OAI, True),
    (16, 720, 2880, "bfloat16", moe.SILU, True),
    (70, 144, 1040, "float16", moe.SILU, False),
]
CPU_CASES = [*CASES, (7, 208, 80, "float32", moe.SILU, True)]
GPU_CASES = [
    *CASES,
    (1, 4096, 1408, "bfloat16", moe.SILU, False),
    (8, 2880, 2880, "float16", moe.SWIGLU_OAI, True),
    (31, 7168, 176, "bfloat16", moe.SILU, True),
    (64, 2048, 1408, "bfloat16", moe.SILU, True),
]
CASES_OF_BOTH = [
    *CPU_CASES,
    *(
        pytest.param(*case, marks=pytest.mark.gpu, id=f"gpu-{i}")
        for i, case in enumerate(GPU_CASES)
    ),
]
both_backends = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)


def draw(rng, num_tokens, hidden, intermediate, dtype="bfloat16", extras=True):
    """Returns x and an expert whose output is of the order of its input."""

    def matrix(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    expert = moe.DenseExpert(matrix(2 * intermediate, hidden), matrix(hidden, intermediate))
    if extras:
        expert = dataclasses.replace(
            expert,
            w13_bias=jnp.asarray(rng.normal(size=2 * intermediate), jnp.float32),
            w2_bias=jnp.asarray(rng.normal(size=hidden), jnp.float32),
            shared_gate=matrix(hidden),
        )
    return jnp.asarray(rng.normal(size=(num_tokens, hidden)), dtype), expert


def poison(*like):
    """Fills the memory that the next results will take with NaN bits, and frees it again."""
    arrays = [
        jnp.full((size,), 0xFF, jnp.uint8)
        for leaf in like
        for size in (leaf.nbytes, 4 * min(leaf.shape[0], 64) * 3 * leaf.shape[1])
        for _ in range(4)
    ]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


def compiled(x, expert, activation=moe.SILU, options=EAGER):
    call = jax.jit(functools.partial(moe.dense_mlp, activation=activation)).lower(x, expert)
    on_cpu = jax.default_backend() == "cpu"
    return call.compile(compiler_options=None if on_cpu else options)


def run(call, x, expert):
    """Returns the result, from poisoned memory."""
    poison(x)
    return np.asarray(call(x, expert))


def oracle(x, expert, activation=moe.SILU):
    """Returns the meaning, computed on the CPU whatever the backend is."""
    with jax.default_device(jax.devices("cpu")[0]):
        x, expert = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (x, expert))
        meaning = jax.jit(functools.partial(reference.dense_mlp, activation=activation))
        return np.asarray(meaning(x, expert))


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "intermediate", "dtype", "activation", "extras"), CASES_OF_BOTH
)
def test_it_equals_the_oracle_and_itself(
    num_tokens, hidden, intermediate, dtype, activation, extras
):
    rng = np.random.default_rng(num_tokens * hidden + intermediate)
    x, expert = draw(rng, num_tokens, hidden, intermediate, dtype, extras)
    captured = compiled(x, expert, activation, CAPTURED)
    first = run(captured, x, expert)
    assert first.dtype == x.dtype
    assert relative_error(first, oracle(x, expert, activation)) <= TOLERANCE[dtype]
    for _ in range(3):
        assert np.array_equal(bits(first), bits(run(captured, x, expert)))


@both_backends
@pytest.mark.parametrize("num_tokens", [2, 13, 66])
def test_a_nan_stays_in_its_own_row(num_tokens, backend):
    rng = np.random.default_rng(1)
    x, expert = draw(rng, num_tokens, 176, 80)
    call = compiled(x, expert)
    clean = run(call, x, expert)
    for row in {0, num_tokens - 1}:
        dirty = run(call, x.at[row, 3].set(jnp.nan), expert)
        assert np.isnan(dirty[row].astype(np.float32)).all()
        others = np.arange(num_tokens) != row
        assert np.array_equal(bits(dirty[others]), bits(clean[others]))


@both_backends
def test_each_extra_alone_is_what_the_oracle_says(backend):
    rng = np.random.default_rng(2)
    x, full = draw(rng, 4, 96, 48)
    for name in ("w13_bias", "w2_bias", "shared_gate"):
        others = {other: None for other in ("w13_bias", "w2_bias", "shared_gate") if other != name}
        expert = dataclasses.replace(full, **others)
        actual = run(compiled(x, expert), x, expert)
        assert relative_error(actual, oracle(x, expert)) <= TOLERANCE["bfloat16"]


def test_no_tokens_give_an_empty_result():
    x, expert = draw(np.random.default_rng(0), 0, 32, 16)
    assert moe.dense_mlp(x, expert).shape == (0, 32)


def test_vmap_over_tokens_is_one_call_with_more_tokens():
    x, expert = draw(np.random.default_rng(3), 6, 64, 32)
    flat = moe.dense_mlp(x, expert)
    mapped = jax.vmap(lambda x: moe.dense_mlp(x, expert))(x.reshape(3, 2, 64))
    assert np.array_equal(flat, mapped.reshape(6, 64))
    experts = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), expert)
    with pytest.raises(ValueError, match="weights of dense_mlp are mapped"):
        jax.vmap(lambda e: moe.dense_mlp(x, e))(experts)


def test_intermediate_split_over_devices_sums_to_the_whole():
    """Tensor parallelism: each device has some of the intermediate columns."""
    x, expert = draw(np.random.default_rng(4), 5, 64, 128, "float32", extras=False)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("model",))
    gate, up = jnp.split(expert.w13, 2)
    split = PartitionSpec("model")

    def part(x, gate, up, w2):
        out = moe.dense_mlp(x, moe.DenseExpert(jnp.concatenate([gate, up]), w2))
        return jax.lax.psum(out, "model")

    whole = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(PartitionSpec(), split, split, PartitionSpec(None, "model")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(x, gate, up, expert.w2)
    assert relative_error(whole, reference.dense_mlp(x, expert)) <= TOLERANCE["float32"]


def test_differentiating_says_what_to_differentiate():
    x, expert = draw(np.random.default_rng(5), 2, 32, 16, "float32")
    with pytest.raises(NotImplementedError, match=r"reference\.dense_mlp"):
        jax.grad(lambda x: moe.dense_mlp(x, expert).sum())(x)
    assert np.isfinite(jax.grad(lambda x: reference.dense_mlp(x, expert).sum())(x)).all()


@pytest.mark.parametrize(
    ("x", "change", "error", "message"),
    [
        (jnp.zeros((2, 32), jnp.int8), {}, TypeError, "x has dtype int8"),
        (jnp.zeros(32), {}, ValueError, r"x has shape \(32,\); it must have two axes"),
        (jnp.zeros((2, 24)), {}, ValueError, "hidden is 24; it must be a positive multiple of 16"),
        (jnp.zeros((2, 48)), {}, ValueError, r"expert.w13 has shape \(32, 32\); .* \(32, 48\)"),
        (jnp.zeros((2, 32), jnp.bfloat16), {}, TypeError, "expert.w13 has dtype float32"),
        (jnp.zeros((2, 32)), {"w2": jnp.zeros((32, 8))}, ValueError, "intermediate is 8"),
        (jnp.zeros((2, 32)), {"w2": None}, TypeError, "expert.w2 is a NoneType"),
        (jnp.zeros((2, 32)), {"w13_bias": jnp.zeros(16)}, ValueError, "w13_bias has shape"),
        (
            jnp.zeros((2, 32)),
            {"w2_bias": jnp.zeros(32, jnp.float16)},
            TypeError,
            "w2_bias has dtype float16; it must be float32",
        ),
        (jnp.zeros((2, 32)), {"shared_gate": jnp.zeros((32, 1))}, ValueError, "shared_gate"),
    ],
)
def test_bad_arguments_are_named(x, change, error, message):
    expert = dataclasses.replace(
        moe.DenseExpert(jnp.zeros((32, 32)), jnp.zeros((32, 16))), **change
    )
    with pytest.raises(error, match=message):
        moe.dense_mlp(x, expert)


def test_other_types_are_named():
    x, expert = draw(np.random.default_rng(6), 1, 32, 16)
    with pytest.raises(TypeError, match="expert is a tuple"):
        moe.dense_mlp(x, (expert.w13, expert.w2))
    with pytest.raises(TypeError, match="activation is 'silu'"):
        moe.dense_mlp(x, expert, activation="silu")


@pytest.mark.gpu
def test_float32_is_refused_on_a_gpu_with_advice():
    x, expert = draw(np.random.default_rng(7), 1, 32, 16, "float32")
    with pytest.raises(TypeError, match="convert x and the weights to bfloat16"):
        moe.dense_mlp(x, expert)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_one_captured_executable_serves_a_hundred_inputs(num_tokens):
    rng = np.random.default_rng(8)
    x, expert = draw(rng, num_tokens, 512, 1408)

    def steps(x, expert):
        # Each step reads what the one before wrote, over scratch that XLA may give to both.
        for _ in range(4):
            x = moe.dense_mlp(x, expert)
        return x

    lowered = jax.jit(steps).lower(x, expert)
    captured, eager = (lowered.compile(compiler_options=o) for o in (CAPTURED, EAGER))
    for _ in range(100):
        x = jnp.asarray(rng.normal(size=x.shape), x.dtype)
        assert np.array_equal(bits(captured(x, expert)), bits(eager(x, expert)))
