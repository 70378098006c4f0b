"""The sums: bits, shapes, dtypes, groups, transformations, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import (
    DTYPES,
    P,
    assert_same_bits,
    mesh_of,
    on_each,
    random_parts,
    rank_order_sum,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh

from jax_b12x import comm

WORLD_SIZES = (2, 3, 4, 8)
SHAPES = ((), (1,), (7,), (3, 5, 11), (8, 6144))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_holds_the_bits_of_the_sum_in_rank_order(world_size, dtype):
    mesh = mesh_of(world_size)
    with comm.ChannelPool(mesh, "tp") as pool:
        for seed, shape in enumerate(SHAPES):
            parts = random_parts(seed, mesh, shape, dtype)
            out = on_each(mesh, lambda x, pool=pool: comm.all_reduce(x, pool))(parts)
            assert_same_bits(out, rank_order_sum(parts, world_size))


@pytest.mark.multigpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_gpus_hold_the_bits_of_the_sum_in_rank_order(dtype):
    mesh = mesh_of(2, "gpu")
    with comm.ChannelPool(mesh, "tp", transport="peer", cutoff="4MB") as pool:
        for seed, shape in enumerate((*SHAPES, (131, 4099), (64, 8192))):
            parts = random_parts(seed, mesh, shape, dtype)
            step = on_each(mesh, lambda x, pool=pool: comm.all_reduce(x, pool))
            for _ in range(3):  # both buffers, and the first again
                assert_same_bits(step(parts), rank_order_sum(parts, 2))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**32 - 1))
def test_any_size_sums_exactly(size, seed):
    mesh = mesh_of(2)
    parts = random_parts(seed, mesh, (size,), jnp.float16)
    with comm.ChannelPool(mesh, "tp") as pool:
        out = on_each(mesh, lambda x: comm.all_reduce(x, pool))(parts)
    assert_same_bits(out, rank_order_sum(parts, 2))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.multigpu)])
def test_special_values_come_out_as_fp32_addition_says(platform):
    mesh = mesh_of(2, platform)
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 65504.0, 6e-8, 3.4e38]
    left, right = (grid.ravel() for grid in np.meshgrid(specials, specials))
    for dtype in DTYPES:
        with np.errstate(over="ignore"):
            parts = np.stack([left, right]).astype(np.float32).astype(dtype)
        with comm.ChannelPool(mesh, "tp") as pool:
            out = np.asarray(on_each(mesh, lambda x, pool=pool: comm.all_reduce(x, pool))(parts))
        with np.errstate(over="ignore", invalid="ignore"):
            expected = rank_order_sum(parts, 2)
        nan = np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), nan)
        assert_same_bits(np.where(nan, dtype(0), out), np.where(nan, dtype(0), expected))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.multigpu)])
def test_all_ones_bits_which_are_nan_stay_nan(platform):
    """A transport that marks empty slots with a bit pattern must not wait for one that is data."""
    mesh = mesh_of(2, platform)
    for dtype in DTYPES:
        width = np.dtype(dtype).itemsize
        bits = np.full((2, 40 * width), 0xFF, np.uint8).view(dtype)
        with comm.ChannelPool(mesh, "tp", timeout=5) as pool:
            out = on_each(mesh, lambda x, pool=pool: comm.all_reduce(x, pool))(bits)
        assert np.isnan(np.asarray(out).astype(np.float32)).all()


@pytest.mark.parametrize("axis", ["dp", "tp", ("dp", "tp"), ("tp", "dp")])
def test_groups_side_by_side_sum_apart(axis):
    devices = np.array(jax.devices("cpu")).reshape(2, 4)
    mesh = Mesh(devices, ("dp", "tp"))
    parts = random_parts(0, mesh, (33,), jnp.bfloat16)
    with comm.ChannelPool(mesh, axis) as pool:
        out = np.asarray(on_each(mesh, lambda x: comm.all_reduce(x, pool))(parts))
    grid = np.asarray(parts).reshape(2, 4, 33)
    if axis == "dp":
        expected = rank_order_sum(grid.swapaxes(0, 1).reshape(8, 33), 2)
        expected = expected.reshape(4, 2, 33).swapaxes(0, 1)
    elif axis == ("tp", "dp"):  # the last axis varies fastest
        expected = rank_order_sum(grid.swapaxes(0, 1).reshape(8, 33), 8)
    else:
        expected = rank_order_sum(grid.reshape(8, 33), 4 if axis == "tp" else 8)
    assert_same_bits(out, expected.reshape(8, 33))


def test_a_rerun_gives_the_same_bits():
    mesh = mesh_of(4)
    parts = random_parts(0, mesh, (1000,), jnp.float32)
    with comm.ChannelPool(mesh, "tp") as pool:
        step = on_each(mesh, lambda x: comm.all_reduce(x, pool))
        first = np.asarray(step(parts))
        for _ in range(20):
            assert_same_bits(step(parts), first)


def test_messages_above_the_cutoff_take_psum():
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp", cutoff=400) as pool:
        below = on_each(mesh, lambda x: comm.all_reduce(x, pool)).lower(jnp.ones((2, 100)))
        above = on_each(mesh, lambda x: comm.all_reduce(x, pool)).lower(jnp.ones((2, 101)))
    assert "b12x_all_reduce" in below.as_text()
    assert "b12x_all_reduce" not in above.as_text()
    assert "stablehlo.all_reduce" in above.as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_is_that_of_psum(check_vma):
    mesh = mesh_of(4)
    x = jax.random.normal(jax.random.key(0), (8, 16))

    def loss(reduce, x):
        summed = jax.shard_map(
            lambda x: reduce(jnp.sin(x)),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P(),
            check_vma=check_vma,
        )(x)
        return jnp.sum(summed**2)

    with comm.ChannelPool(mesh, "tp") as pool:
        ours = jax.jit(jax.grad(lambda x: loss(lambda y: comm.all_reduce(y, pool), x)))(x)
        second = jax.jit(jax.hessian(lambda x: loss(lambda y: comm.all_reduce(y, pool), x)))(x)
    psums = jax.jit(jax.grad(lambda x: loss(lambda y: lax.psum(y, "tp"), x)))(x)
    second_psums = jax.jit(jax.hessian(lambda x: loss(lambda y: lax.psum(y, "tp"), x)))(x)
    # Four addends in two orders: a few roundings of fp32 apart.
    np.testing.assert_allclose(ours, psums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second, second_psums, rtol=1e-5, atol=1e-5)


def test_where_jax_tracks_it_the_sum_is_known_to_be_the_same_on_every_rank():
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp") as pool:
        step = jax.jit(
            jax.shard_map(
                lambda x, same: (comm.all_reduce(x, pool), comm.all_reduce(same, pool)),
                mesh=mesh,
                in_specs=(P("tp"), P()),
                out_specs=P(),  # refused by shard_map for a value that differs
            )
        )
        summed, doubled = step(jnp.arange(4.0), jnp.arange(3.0))
    np.testing.assert_array_equal(summed, [2, 4])
    np.testing.assert_array_equal(doubled, [0, 2, 4])


def test_vmap_makes_one_larger_message():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (5, 12), jnp.float32)
    with comm.ChannelPool(mesh, "tp") as pool:
        step = on_each(mesh, jax.vmap(lambda x: comm.all_reduce(x, pool), in_axes=1, out_axes=1))
        assert_same_bits(step(parts), rank_order_sum(parts, 2))
        assert [record.capacity for record in pool.records()] == [5 * 12 * 4]


@pytest.mark.parametrize("isolation", ["call_site", "executable", "lane"])
def test_it_works_without_jit_where_jax_allows_it_and_inside_remat(isolation):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with comm.ChannelPool(mesh, "tp", isolation=isolation) as pool:

        def body(x):
            with pool.ordered():
                return comm.all_reduce(x, pool)

        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
        if isolation == "call_site":
            assert_same_bits(mapped(parts), rank_order_sum(parts, 2)[:1])
            grad = jax.grad(lambda x: jax.checkpoint(mapped)(x).sum())(parts)
            assert np.isfinite(grad).all()
        assert_same_bits(jax.jit(mapped)(parts), rank_order_sum(parts, 2)[:1])


def rms_norm_oracle(parts, residual, weight, eps, world_size):
    """new_residual bit for bit; normed in fp64, to compare within a rounding."""
    parts, residual, weight = (np.asarray(each) for each in (parts, residual, weight))
    total = parts[0].astype(np.float32)
    for rank in range(1, world_size):
        total = total + parts[rank].astype(np.float32)
    new_residual = (total + residual.astype(np.float32)).astype(residual.dtype)
    wide = new_residual.astype(np.float64)
    scale = 1 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide * scale * weight.astype(np.float64), new_residual


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    ("platform", "world_size"),
    [("cpu", 2), ("cpu", 3), ("cpu", 8), pytest.param("gpu", 2, marks=pytest.mark.multigpu)],
)
def test_the_fused_norm_is_the_sum_the_residual_and_the_norm(platform, world_size, dtype):
    mesh = mesh_of(world_size, platform)
    rng = np.random.default_rng(0)
    eps = 1e-5
    shapes = ((1, 64), (2, 3, 130), (5, 7), (8, 6144), (2, 20000))
    with comm.ChannelPool(mesh, "tp") as pool:
        for shape in shapes:
            parts = random_parts(1, mesh, shape, dtype)
            residual = rng.standard_normal(shape).astype(dtype)
            weight = (1 + 0.1 * rng.standard_normal(shape[-1:])).astype(dtype)
            step = jax.jit(
                jax.shard_map(
                    lambda x, r, w, pool=pool: tuple(
                        y[None] for y in comm.all_reduce_rms_norm(x[0], r, w, eps, pool)
                    ),
                    mesh=mesh,
                    in_specs=(P("tp"), P(), P()),
                    out_specs=P("tp"),
                    check_vma=False,
                )
            )
            normed, new_residual = map(np.asarray, step(parts, residual, weight))
            exact, expected = rms_norm_oracle(parts, residual, weight, eps, world_size)
            for rank in range(world_size):
                assert_same_bits(new_residual[rank], expected)
                assert_same_bits(normed[rank], normed[0])
            # fp32 arithmetic, then one rounding to the dtype: half a unit in the last place of it,
            # and of fp32 about the square root of the terms of the mean in roundings.
            unit = float(jnp.finfo(dtype).eps)
            slack = np.sqrt(shape[-1]) * 2.0**-23
            np.testing.assert_allclose(
                normed[0].astype(np.float64), exact, rtol=unit / 2 + slack, atol=1e-7
            )


def test_the_fused_norm_above_the_cutoff_has_the_same_meaning():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (4, 64), jnp.float32)
    residual, weight = jnp.ones((4, 64)), jnp.full((64,), 2.0)
    results = []
    for cutoff in (0, "1MB"):
        with comm.ChannelPool(mesh, "tp", cutoff=cutoff) as pool:
            step = jax.shard_map(
                lambda x, pool=pool: comm.all_reduce_rms_norm(x[0], residual, weight, 1e-6, pool),
                mesh=mesh,
                in_specs=P("tp"),
                out_specs=P(),
            )
            results.append(jax.jit(step)(parts))
    for by_xla, ours in zip(*results, strict=True):
        np.testing.assert_allclose(by_xla, ours, rtol=1e-5)


@pytest.mark.parametrize("cutoff", [0, "1MB"])
def test_the_fused_norm_says_that_it_is_inference_only(cutoff):
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp", cutoff=cutoff) as pool:
        step = jax.shard_map(
            lambda x: comm.all_reduce_rms_norm(x, x, jnp.ones(8), 1e-6, pool)[0],
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
            check_vma=False,
        )
        with pytest.raises(TypeError, match="inference-only"):
            jax.grad(lambda x: step(x).sum())(jnp.ones((2, 8)))


def test_mistakes_are_named_when_the_program_is_traced():
    mesh = mesh_of(2)
    other = Mesh(mesh.devices[::-1], ("tp",))
    with comm.ChannelPool(mesh, "tp") as pool:

        def trace(body, mesh=mesh, shape=(2, 8), dtype=jnp.float32):
            mapped = jax.shard_map(
                body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False
            )
            jax.jit(mapped).lower(jax.ShapeDtypeStruct(shape, dtype))

        with pytest.raises(TypeError, match="x must be bfloat16, float16, float32, not int32"):
            trace(lambda x: comm.all_reduce(x, pool), dtype=jnp.int32)
        with pytest.raises(ValueError, match="must be inside a shard_map over the pool's mesh"):
            jax.jit(lambda x: comm.all_reduce(x, pool)).lower(jnp.ones(4))
        with pytest.raises(ValueError, match="make the pool for the program's mesh"):
            trace(lambda x: comm.all_reduce(x, pool), mesh=other)
        ones = jnp.ones
        with pytest.raises(ValueError, match=r"residual must have the shape of x, \(1, 8\)"):
            trace(lambda x: comm.all_reduce_rms_norm(x, ones((8,)), ones(8), 1e-6, pool)[0])
        with pytest.raises(ValueError, match=r"weight must have the shape \[hidden\], \(8,\)"):
            trace(lambda x: comm.all_reduce_rms_norm(x, x, ones(4), 1e-6, pool)[0])
        with pytest.raises(TypeError, match="weight must have the dtype of x, float32"):
            trace(lambda x: comm.all_reduce_rms_norm(x, x, ones(8, jnp.bfloat16), 1e-6, pool)[0])
        with pytest.raises(TypeError, match="x must be an array, not a dict"):
            trace(lambda x: comm.all_reduce({"a": x}, pool))
        with pytest.raises(ValueError, match=r"x must be \[..., hidden\], not a scalar"):
            trace(lambda x: comm.all_reduce_rms_norm(x[0, 0], x[0, 0], ones(()), 0, pool)[0][None])
        for eps, error, message in (
            ("x", TypeError, "eps must be a number, not 'x'"),
            ("1e-5", TypeError, "eps must be a number, not '1e-5'"),
            (None, TypeError, "eps must be a number that tracing knows, not None"),
            (True, TypeError, "eps must be a number, not True"),
            (-100, ValueError, "eps must be 0 or more, not -100"),
            (np.nan, ValueError, "eps must be finite, not nan"),
        ):
            with pytest.raises(error, match=message):
                trace(lambda x, eps=eps: comm.all_reduce_rms_norm(x, x, ones(8), eps, pool)[0])
        with pytest.raises(TypeError, match="eps must be a number that tracing knows, not"):
            trace(lambda x: comm.all_reduce_rms_norm(x, x, ones(8), x[0, 0], pool)[0])
    with pytest.raises(comm.ChannelError, match="pool 'tp2' is closed"):
        trace(lambda x: comm.all_reduce(x, pool))


@pytest.mark.parametrize("x64", [False, True])
def test_a_python_number_is_summed_in_fp32(x64):
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp") as pool, jax.enable_x64(x64):
        out = on_each(mesh, lambda _: comm.all_reduce(1.5, pool))(jnp.ones((2, 1), jnp.float32))
    assert_same_bits(out, np.full(2, 3.0, np.float32))


def test_one_rank_is_a_sum_of_one():
    mesh = mesh_of(1)
    with comm.ChannelPool(mesh, "tp") as pool:
        step = jax.shard_map(
            lambda x: comm.all_reduce(x, pool), mesh=mesh, in_specs=P("tp"), out_specs=P()
        )
        np.testing.assert_array_equal(jax.jit(step)(jnp.arange(5.0)), jnp.arange(5.0))
        assert not pool.records()
