"""The exchanges of decode context parallelism: bits, adversarial LSEs, layouts, what is refused."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import PLATFORMS, P, assert_same_bits, mesh_of, on_each
from jax.sharding import Mesh

from jax_b12x import _native, comm
from jax_b12x.comm import dcp_reference
from jax_b12x.comm.memory import PACKET_BYTES

COMBINE_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
GATHER_DTYPES = (*COMBINE_DTYPES, jnp.float8_e4m3fn, jnp.float8_e5m2)
WORLDS = [
    ("cpu", 2),
    ("cpu", 3),
    ("cpu", 4),
    ("cpu", 8),
    pytest.param("gpu", 2, marks=pytest.mark.multigpu),
]


def combine_oracle(partials, lses, base="e"):
    """The combine in fp64: [world, ...rows, head_dim] and [world, ...rows]."""
    partials, lses = np.asarray(partials), np.asarray(lses, np.float64)
    present = np.isfinite(lses)
    unit = 1.0 if base == "e" else np.log(2.0)
    highest = np.max(np.where(present, lses, -np.inf), axis=0)
    some = np.isfinite(highest)
    distance = np.where(present, lses, 0) - np.where(some, highest, 0)
    shares = np.where(present, np.exp(distance * unit), 0)
    total = np.where(some, shares.sum(axis=0), 1)
    wide = np.where(present[..., None], partials.astype(np.float64), 0)
    out = np.sum(shares[..., None] / total[..., None] * wide, axis=0)
    return out, np.where(some, highest + np.log(total) / unit, -np.inf)


def tolerance(partials, lses, dtype):
    """One rounding to the dtype, and in fp32 a few of the exponential and one a rank for the sum.

    The exponential's argument is rounded once: half a unit of the largest distance that matters.
    """
    world_size = len(lses)
    distances = np.abs(np.where(np.isfinite(lses), lses, 0)).max()
    fp32 = 2.0**-23 * (8 + 2 * world_size + min(distances, 100.0))
    magnitude = np.abs(np.where(np.isfinite(partials), partials, 0).astype(np.float64)).max()
    return float(jnp.finfo(dtype).eps) / 2, fp32 * magnitude + float(
        jnp.finfo(dtype).smallest_subnormal
    )


def combined(pool, partials, lses, **options):
    """Runs ``dcp_combine``; returns each rank's result, and the LSEs."""
    step = on_each(
        pool.topology.mesh,
        lambda x, lse: comm.dcp_combine(x, lse, pool, return_lse=True, **options),
    )
    return step(partials, lses)


def whole(parts, axis):
    """Puts the ranks' heads together."""
    return np.concatenate(list(np.asarray(parts)), axis=axis)


@pytest.mark.parametrize("dtype", COMBINE_DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize(("platform", "world_size"), WORLDS)
def test_each_rank_gets_its_heads_weighted_by_the_softmax_of_the_lse(
    platform, world_size, base, dtype
):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(world_size)
    shapes = [(1, 8), (3, 64), (2, 128), (1, 512), (5, 576), (1, 1024)]
    if platform == "gpu":
        shapes += [(64, 512), (4096, 64)]
    with comm.DcpPool(mesh, "tp", cutoff="64MB", timeout=20) as pool:
        for batch, head_dim in shapes:
            heads = world_size * 3
            partials = rng.standard_normal((world_size, batch, heads, head_dim)).astype(dtype)
            lses = rng.normal(0, 3, (world_size, batch, heads)).astype(np.float32)
            for _ in range(2):
                out, lse = combined(pool, partials, lses, lse_base=base)
            exact, exact_lse = combine_oracle(partials, lses, base)
            rtol, atol = tolerance(partials, lses, dtype)
            actual = whole(out, axis=-2).astype(np.float64)
            np.testing.assert_allclose(actual, exact, rtol=rtol, atol=atol)
            np.testing.assert_allclose(whole(lse, axis=-1), exact_lse, rtol=2e-6, atol=2e-6)


def adversarial_lses(world_size):
    """By name: ``f32[world_size, cases]`` of one kind of LSEs."""
    inf, nan = np.inf, np.nan
    ranks = np.arange(world_size, dtype=np.float32)
    return {
        "all equal": np.full((world_size, 1), -7.25),
        "one dominant by 100": np.stack([100.0 * (ranks == r) for r in range(world_size)], axis=1),
        "one dominant by 1e30": np.stack([1e30 * (ranks == r) for r in range(world_size)], axis=1),
        "-inf on all but one": np.stack(
            [np.where(ranks == r, -3.0, -inf) for r in range(world_size)], axis=1
        ),
        "each kind of empty": np.stack(
            [
                np.where(ranks == r, empty, 2.0)
                for r in range(world_size)
                for empty in (-inf, inf, nan)
            ],
            axis=1,
        ),
        "all empty": np.stack([np.full(world_size, each) for each in (-inf, inf, nan)], axis=1),
        "very low": np.stack([-1e30 - 1e28 * ranks, -300.0 - ranks], axis=1),
    }


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("base", ["e", "2"])
def test_adversarial_lses_come_out_as_the_oracle_says(platform, world_size, base):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(0)
    with comm.DcpPool(mesh, "tp", timeout=20) as pool:
        for name, cases in adversarial_lses(world_size).items():
            count = cases.shape[1]
            # [world, batch = case, heads, head_dim]; every head of a case has its LSEs.
            lses = np.repeat(cases[:, :, None], world_size, axis=2).astype(np.float32)
            partials = rng.standard_normal((world_size, count, world_size, 16)).astype(np.float32)
            # What an empty shard holds must not matter.
            partials[~np.isfinite(lses)] = np.nan
            out, lse = combined(pool, partials, lses, lse_base=base)
            out, lse = whole(out, axis=-2), whole(lse, axis=-1)
            exact, exact_lse = combine_oracle(partials, lses, base)
            rtol, atol = tolerance(partials, lses, jnp.float32)
            np.testing.assert_allclose(out, exact, rtol=rtol, atol=atol, err_msg=name)
            np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-6, err_msg=name)
            if name == "all empty":
                assert_same_bits(out, np.zeros_like(out))
                assert_same_bits(lse, np.full_like(lse, -np.inf))
            if name == "-inf on all but one":  # the one shard's output, bit for bit
                for case in range(count):
                    assert_same_bits(out[case], partials[case, case])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_denormal_weights_count(platform):
    """exp(-95) is a subnormal fp32 number; times a large value it is a result that can be seen."""
    mesh = mesh_of(2, platform)
    lses = np.zeros((2, 1, 2), np.float32)
    lses[1] = -95.0
    partials = np.zeros((2, 1, 2, 16), np.float32)
    partials[1] = 3e38
    with comm.DcpPool(mesh, "tp") as pool:
        out, _ = combined(pool, partials, lses)
    # A subnormal weight of about 5.5e-42 is a multiple of 2^-149: 4e3 steps.
    np.testing.assert_allclose(np.asarray(out), np.exp(-95.0) * 3e38, rtol=1e-3)


def test_a_nan_in_a_shard_that_is_not_empty_is_not_hidden():
    mesh = mesh_of(2)
    partials = np.ones((2, 1, 2, 8), np.float32)
    partials[1, 0, 0, 3] = np.nan
    lses = np.zeros((2, 1, 2), np.float32)
    with comm.DcpPool(mesh, "tp") as pool:
        out = whole(combined(pool, partials, lses)[0], axis=-2)
    expected = np.ones((1, 2, 8), bool)
    expected[0, 0, 3] = False
    np.testing.assert_array_equal(np.isfinite(out), expected)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
def test_the_combine_is_the_jnp_oracle_and_a_rerun_gives_the_same_bits(platform, cutoff):
    mesh = mesh_of(2, platform)
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((2, 4, 6, 64)).astype(jnp.bfloat16)
    lses = rng.normal(0, 5, (2, 4, 6)).astype(np.float32)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff) as pool:
        step = on_each(mesh, lambda x, lse: comm.dcp_combine(x, lse, pool))
        first = np.asarray(step(partials, lses))
        for _ in range(10):
            assert_same_bits(step(partials, lses), first)
        assert len(pool.records()) == (0 if cutoff == 0 else 1)
    oracle, _ = dcp_reference.combine(jnp.asarray(partials), jnp.asarray(lses))
    # Two roundings to bfloat16 at most apart.
    np.testing.assert_allclose(
        whole(first, axis=-2).astype(np.float32), np.asarray(oracle, np.float32), rtol=2.0**-7
    )


@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
@pytest.mark.parametrize(("platform", "world_size"), WORLDS)
def test_the_gather_brings_every_bit_of_every_head(platform, world_size, cutoff):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(0)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff, timeout=20) as pool:
        for dtype, shape in itertools.product(
            GATHER_DTYPES, [(1, 1, 8), (3, 2, 64), (5, 3, 576), (2, 1, 24)]
        ):
            parts = rng.standard_normal((world_size, *shape)).astype(dtype)
            step = on_each(mesh, lambda q, pool=pool: comm.dcp_gather_heads(q, pool))
            expected = whole(parts, axis=-2)
            for _ in range(3):
                out = np.asarray(step(parts))
                for rank in range(world_size):
                    assert_same_bits(out[rank], expected)


@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
@pytest.mark.parametrize(("platform", "world_size"), WORLDS)
def test_a_pair_travels_in_one_message_whatever_its_dtypes(platform, world_size, cutoff):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(0)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff, timeout=20) as pool:
        a = rng.standard_normal((world_size, 3, 2, 512)).astype(jnp.float8_e4m3fn)
        b = rng.standard_normal((world_size, 3, 2, 64)).astype(jnp.bfloat16)
        c = rng.standard_normal((world_size, 1, 1, 8)).astype(jnp.float8_e5m2)
        steps = []
        for first, second in ((a, b), (b, a), (c, b), (c, c)):
            step = on_each(mesh, lambda x, y, pool=pool: comm.dcp_gather_pair(x, y, pool))
            for got, sent in zip(step(first, second), (first, second), strict=True):
                for rank in range(world_size):
                    assert_same_bits(np.asarray(got)[rank], whole(sent, axis=-2))
            steps.append(step)
        # One channel each.
        assert [record.op for record in pool.records()] == ["dcp_gather"] * (4 if cutoff else 0)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", GATHER_DTYPES, ids=lambda dtype: dtype.__name__)
def test_all_ones_bits_which_are_nan_arrive_as_nan(platform, dtype):
    mesh = mesh_of(2, platform)
    bits = np.full((2, 3, 1, 16 * np.dtype(dtype).itemsize), 0xFF, np.uint8).view(dtype)
    with comm.DcpPool(mesh, "tp", timeout=5) as pool:
        out = np.asarray(on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))(bits))
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
@pytest.mark.parametrize("platform", PLATFORMS)
def test_head_major_arrays_are_taken_as_they_are(platform, cutoff):
    mesh = mesh_of(2, platform)
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((2, 6, 5, 32)).astype(np.float32)  # heads, batch, head_dim
    lses = rng.normal(0, 5, (2, 6, 5)).astype(np.float32)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff) as pool:
        out, lse = combined(pool, partials, lses, heads_axis=0)
        exact, exact_lse = combine_oracle(partials, lses)
        rtol, atol = tolerance(partials, lses, jnp.float32)
        np.testing.assert_allclose(whole(out, axis=0), exact, rtol=rtol, atol=atol)
        np.testing.assert_allclose(whole(lse, axis=0), exact_lse, rtol=2e-6, atol=2e-6)
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool, heads_axis=0))
        assert_same_bits(np.asarray(step(partials))[1], whole(partials, axis=0))
        # More axes: heads between two of them.
        deep = partials.reshape(2, 3, 2, 5, 32)
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool, heads_axis=1))
        assert_same_bits(np.asarray(step(deep))[0], whole(deep, axis=1))


@pytest.mark.parametrize("heads_axis", [0, 1])
def test_neither_order_of_axes_is_copied_on_its_way_to_the_call(heads_axis):
    mesh = mesh_of(2)
    with comm.DcpPool(mesh, "tp") as pool:
        step = jax.jit(
            jax.shard_map(
                lambda x, lse: comm.dcp_combine(x, lse, pool, heads_axis=heads_axis),
                mesh=mesh,
                in_specs=P(),
                out_specs=P("tp"),
                check_vma=False,
            )
        )
        text = step.lower(jnp.ones((4, 4, 64)), jnp.ones((4, 4))).compile().as_text()
    assert "b12x_dcp_combine" in text
    for moves in (" transpose(", " copy(", " fusion("):
        assert moves not in text, text


@pytest.mark.parametrize("axis", ["dp", "tp", ("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
def test_groups_side_by_side_exchange_apart(axis, cutoff):
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("dp", "tp"))
    rng = np.random.default_rng(0)
    heads = 8
    partials = rng.standard_normal((8, 2, heads, 16)).astype(np.float32)
    lses = rng.normal(0, 2, (8, 2, heads)).astype(np.float32)
    with comm.DcpPool(mesh, axis, cutoff=cutoff) as pool:
        out, _ = combined(pool, partials, lses)
        gathered = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))(partials)
    grid = np.arange(8).reshape(2, 4)
    if axis == "dp":
        groups = grid.T
    elif axis == "tp":
        groups = grid
    else:  # the last axis varies fastest
        groups = (grid if axis == ("dp", "tp") else grid.T).reshape(1, 8)
    for group in groups:
        exact, _ = combine_oracle(partials[group], lses[group])
        got = whole(np.asarray(out)[group], axis=-2)
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
        for device in group:
            assert_same_bits(np.asarray(gathered)[device], whole(partials[group], axis=-2))


def test_vmap_makes_one_message_with_more_rows():
    mesh = mesh_of(2)
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((2, 3, 4, 5, 16)).astype(np.float32)
    lses = rng.normal(0, 2, (2, 3, 4, 5)).astype(np.float32)
    with comm.DcpPool(mesh, "tp") as pool:
        step = on_each(
            mesh,
            jax.vmap(
                lambda x, lse: comm.dcp_combine(x, lse, pool, return_lse=True),
                in_axes=(2, 2),
                out_axes=2,
            ),
        )
        out, _ = step(partials, lses)
        exact, _ = combine_oracle(partials, lses)
        np.testing.assert_allclose(whole(out, axis=-3), exact, rtol=1e-5, atol=1e-5)
        lse_bytes = 512  # 30 packets of 16 bytes, in whole lines
        assert [record.capacity for record in pool.records()] == [lse_bytes + 30 * 64]
        step = on_each(mesh, jax.vmap(lambda q: comm.dcp_gather_heads(q, pool)))
        assert_same_bits(np.asarray(step(partials[:, :, 0]))[0], whole(partials[:, :, 0], axis=1))


SIXTEEN = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
os.environ["NPROC"] = "64"
sys.path.insert(0, sys.argv[1])
import numpy as np
from comm_testing import assert_same_bits, mesh_of, on_each
from test_dcp import combine_oracle, combined, whole
from jax_b12x import comm

mesh = mesh_of(16)
rng = np.random.default_rng(0)
partials = rng.standard_normal((16, 2, 32, 24)).astype(np.float32)
lses = rng.normal(0, 3, (16, 2, 32)).astype(np.float32)
with comm.DcpPool(mesh, "tp") as pool:
    out, _ = combined(pool, partials, lses)
    exact, _ = combine_oracle(partials, lses)
    np.testing.assert_allclose(whole(out, axis=-2), exact, rtol=1e-5, atol=1e-5)
    step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))
    assert_same_bits(np.asarray(step(partials))[15], whole(partials, axis=-2))
    assert len(pool.records()) == 2
print("sixteen")
"""


def test_sixteen_ranks_exchange(tmp_path):
    script = tmp_path / "sixteen.py"
    script.write_text(SIXTEEN)
    done = subprocess.run(
        [sys.executable, str(script), os.path.dirname(__file__)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "sixteen\n", done.stdout + done.stderr


def test_a_batch_beyond_2_to_the_31_elements_has_places_of_64_bits():
    """The arithmetic that kernels and handlers share, at sizes that no test machine need hold."""
    places = _native.host().dcp_places
    for batch, heads, head_dim, world_size in (
        (1 << 17, 128, 512, 8),  # 2^33 elements
        (1 << 20, 64, 576, 16),
        (3_000_017, 16, 1024, 2),
    ):
        local = heads // world_size
        assert batch * heads * head_dim > 2**31
        row_bytes = 2 * head_dim
        # An LSE for each 512 bytes of a row, then the rows at a new line.
        lses = -(-batch * local * -(-row_bytes // 512) * PACKET_BYTES // 128) * 128
        for token, head, rank in (
            (0, 0, 0),
            (batch // 2 + 1, local // 2, 1),
            (batch - 1, local - 1, world_size - 1),
        ):
            row = token * local + head
            assert places(batch, local, world_size, head_dim, 2, row, rank) == (
                token * heads + rank * local + head,
                lses + row * row_bytes,
                lses + batch * local * row_bytes,
            )
            # [heads, batch]: one outer row.
            row = head * batch + token
            assert places(1, local * batch, world_size, head_dim, 2, row, rank) == (
                (rank * local + head) * batch + token,
                lses + row * row_bytes,
                lses + batch * local * row_bytes,
            )


@pytest.mark.multigpu
def test_gpus_combine_and_gather_more_than_2_to_the_31_elements():
    mesh = mesh_of(2, "gpu")
    batch, heads, head_dim = (1 << 17) + 3, 32, 512
    shape = (batch, heads, head_dim)
    assert np.prod(shape, dtype=np.int64) > 2**31
    with comm.DcpPool(mesh, "tp", cutoff=2**33, timeout=60) as pool:

        def body(seed):
            # Rows that tell where they are, and the rank: exact in bfloat16.
            row = jax.lax.broadcasted_iota(jnp.int32, shape[:2], 0) % 128
            value = row + jax.lax.broadcasted_iota(jnp.int32, shape[:2], 1) % 2 + seed
            rank = jax.lax.axis_index("tp")
            x = jnp.broadcast_to(value[..., None], shape).astype(jnp.bfloat16)
            lse = jnp.where((row + rank) % 2 == 0, 1.0, -jnp.inf)
            out = comm.dcp_combine(x * (rank + 1).astype(x.dtype), lse, pool)
            owner = row % 2 + 1  # the rank whose shard is there, plus one
            local = heads // 2
            mine = jax.lax.dynamic_slice_in_dim(value * owner, rank * local, local, axis=1)
            wrong = jnp.sum(out.astype(jnp.float32) != mine[..., None].astype(jnp.float32))
            return wrong.astype(jnp.int32)

        wrong = on_each(mesh, body)(jnp.zeros((2,), jnp.int32))
        np.testing.assert_array_equal(wrong, [0, 0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lse_base": "10"}, ValueError, "lse_base must be one of e, 2, not '10'"),
        ({"heads_axis": 2}, ValueError, "heads_axis=2 must be an axis of partial_out"),
        ({"heads_axis": "h"}, TypeError, "heads_axis must be a whole number, not 'h'"),
        ({"heads_axis": True}, TypeError, "heads_axis must be a whole number, not True"),
        ({"x": jnp.ones((2, 0, 8)), "lse": jnp.ones((2, 0))}, ValueError, "partial_out has no h"),
        ({"heads_axis": -4}, ValueError, "heads_axis=-4 must be an axis of partial_out"),
        ({"x": jnp.ones((2, 4, 12))}, ValueError, "head_dim 12; it must be a multiple of 8"),
        ({"x": jnp.ones((2, 4, 1032))}, ValueError, "head_dim 1032; it must be a multiple of 8"),
        ({"x": jnp.ones((2, 4, 8), jnp.int8)}, TypeError, "partial_out must be bfloat16, float16"),
        ({"x": jnp.ones((8,))}, ValueError, "partial_out must have heads and head_dim"),
        ({"x": jnp.ones((2, 3, 8)), "lse": jnp.ones((2, 3))}, ValueError, "3 heads .* divisible"),
        ({"lse": jnp.ones((2, 4), jnp.bfloat16)}, TypeError, "lse must be float32, not bfloat16"),
        ({"lse": jnp.ones((4, 2))}, ValueError, r"lse must have the shape .*\(2, 4\), not \(4, 2"),
    ],
)
def test_arguments_of_the_combine_are_refused_by_name(change, error, message):
    mesh = mesh_of(2)
    arguments = {"x": jnp.ones((2, 4, 8)), "lse": jnp.ones((2, 4)), **change}
    x, lse = arguments.pop("x"), arguments.pop("lse")
    with comm.DcpPool(mesh, "tp") as pool:
        step = jax.shard_map(
            lambda x, lse: comm.dcp_combine(x, lse, pool, **arguments),
            mesh=mesh,
            in_specs=P(),
            out_specs=P("tp"),
            check_vma=False,
        )
        with pytest.raises(error, match=message):
            jax.jit(step).lower(x, lse)


def test_dtypes_that_a_gather_cannot_mark_as_missing_are_refused():
    mesh = mesh_of(2)
    with comm.DcpPool(mesh, "tp") as pool:
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))
        for dtype in (jnp.int32, jnp.float8_e4m3fnuz):
            with pytest.raises(TypeError, match="q must be bfloat16, float16, float32, float8_e4"):
                step.lower(jnp.ones((2, 1, 1, 8), dtype))


@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
def test_a_gather_of_no_heads_is_refused_and_of_no_tokens_is_nothing(cutoff):
    mesh = mesh_of(2)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff) as pool:
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))
        with pytest.raises(ValueError, match=r"q has no heads: axis 1 of \(3, 0, 8\)"):
            step.lower(jnp.ones((2, 3, 0, 8)))
        assert step(jnp.ones((2, 0, 3, 8))).shape == (2, 0, 6, 8)
        with pytest.raises(TypeError, match="q must be an array, not a dict"):
            on_each(mesh, lambda q: comm.dcp_gather_heads({"a": q}, pool)).lower(
                jnp.ones((2, 1, 1, 8))
            )


def test_each_kind_of_pool_takes_its_own_calls():
    mesh = mesh_of(2)
    x = jnp.ones((2, 1, 2, 8))
    with comm.DcpPool(mesh, "tp") as dcp, comm.ChannelPool(mesh, "tp") as channels:
        assert (dcp.name, channels.name) == ("dcp_tp2", "tp2")
        with pytest.raises(
            TypeError, match=r"all_reduce: pool must be a comm.ChannelPool, not Dcp"
        ):
            on_each(mesh, lambda x: comm.all_reduce(x, dcp)).lower(x)
        with pytest.raises(TypeError, match=r"dcp_gather_heads: pool must be a comm.DcpPool, not"):
            on_each(mesh, lambda x: comm.dcp_gather_heads(x, channels)).lower(x)


def test_a_call_outside_a_shard_map_says_so():
    mesh = mesh_of(2)
    outside = pytest.raises(ValueError, match="dcp_gather_heads must be inside a shard_map")
    with comm.DcpPool(mesh, "tp") as pool, outside:
        comm.dcp_gather_heads(jnp.ones((1, 1, 8)), pool)


@pytest.mark.parametrize("cutoff", [0, "8MB"], ids=("xla", "channel"))
def test_differentiating_says_that_it_is_inference_only(cutoff):
    mesh = mesh_of(2)
    with comm.DcpPool(mesh, "tp", cutoff=cutoff) as pool:
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))
        with pytest.raises(TypeError, match="dcp_gather_heads is inference-only"):
            jax.grad(lambda q: step(q).sum())(jnp.ones((2, 1, 1, 8)))


def test_one_rank_needs_no_exchange():
    mesh = mesh_of(1)
    rng = np.random.default_rng(0)
    partials = rng.standard_normal((1, 2, 3, 8)).astype(np.float32)
    with comm.DcpPool(mesh, "tp") as pool:
        out, lse = combined(pool, partials, np.zeros((1, 2, 3), np.float32))
        assert_same_bits(out, partials)
        assert_same_bits(lse, np.zeros((1, 2, 3), np.float32))
        step = on_each(mesh, lambda q: comm.dcp_gather_heads(q, pool))
        assert_same_bits(step(partials), partials)
        assert not pool.records()
