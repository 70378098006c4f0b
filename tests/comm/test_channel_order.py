"""Ordered programs: call sites that share a channel, through all of JAX's control flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import (
    PLATFORMS,
    assert_same_bits,
    every_kind,
    mesh_of,
    on_each,
    random_parts,
)
from jax import lax

import jax_b12x
from jax_b12x import comm

SHARED = pytest.mark.parametrize("isolation", ["executable", "lane"])


@every_kind
@SHARED
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_order_holds_through_control_flow(kind, isolation, platform):
    mesh = mesh_of(2, platform)
    parts = random_parts(0, mesh, (130,), jnp.float32)
    other = random_parts(1, mesh, (40,), jnp.float32)
    half = np.float32(0.5)
    with kind.pool(mesh, "tp", isolation=isolation, timeout=20) as pool:

        def call(x):
            return kind.call(x, pool) * half

        def body(x, y):
            with pool.ordered():
                first = call(y)  # independent of all that follows
                x, _ = lax.scan(lambda x, _: (call(x), call(y)), x, None, length=3)
                x = lax.cond(first[0] < 1e9, lambda x: call(call(x)), lambda x: x, x)
                _, x = lax.while_loop(
                    lambda state: state[0] < 2, lambda state: (state[0] + 1, call(state[1])), (0, x)
                )
                x = jax.jit(call)(x)
                last = call(y)
            return x, first, last

        step = on_each(mesh, body)
        expected = np.asarray(parts)
        for _ in range(3 + 2 + 2 + 1):
            expected = kind.expected(expected, 2) * half
        expected_other = kind.expected(other, 2) * half
        for _ in range(20):
            x, first, last = step(parts, other)
            assert_same_bits(x, expected)
            assert_same_bits(first, expected_other)
            assert_same_bits(last, expected_other)
        assert len(pool.records()) == 1


@every_kind
@SHARED
def test_an_order_is_opened_inside_shard_map(kind, isolation):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp", isolation=isolation) as pool:
        step = on_each(mesh, lambda x: kind.call(x, pool))

        def around(x):
            with pool.ordered():
                return step(x)

        for wrong in (around, jax.jit(around)):
            with pytest.raises(
                ValueError,
                match=r"pool.ordered\(\) must be inside a shard_map over the",
            ):
                wrong(jnp.ones((2, 8)))


@every_kind
@SHARED
def test_an_order_is_opened_under_jit(kind, isolation):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp", isolation=isolation) as pool:
        body = pool.ordered()(lambda x: kind.call(x, pool))
        eager = jax.shard_map(body, mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P("tp"))
        with pytest.raises(ValueError, match=r"pool.ordered\(\) must be under jax.jit"):
            eager(jnp.ones((2, 8)))


@every_kind
@SHARED
def test_vmap_goes_around_an_order(kind, isolation):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (3, 8), jnp.float32)
    with kind.pool(mesh, "tp", isolation=isolation) as pool:
        body = pool.ordered()(lambda x: kind.call(x, pool))
        assert_same_bits(on_each(mesh, jax.vmap(body))(parts), kind.expected(parts, 2))


def test_without_shared_channels_an_order_may_be_anywhere():
    mesh = mesh_of(2)
    for options in ({}, {"transport": "xla", "isolation": "lane"}):
        with comm.ChannelPool(mesh, "tp", **options) as pool, pool.ordered():
            step = on_each(mesh, lambda x, pool=pool: comm.all_reduce(x, pool))
            np.testing.assert_array_equal(step(jnp.ones((2, 8))), np.full((2, 8), 2.0))


@every_kind
@SHARED
def test_each_call_takes_the_token_of_the_one_before_it(kind, isolation):
    """The order is in the program that XLA gets, not in how it happens to schedule it."""
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp", isolation=isolation) as pool:

        def body(x):
            with pool.ordered():
                return [kind.call(x + i, pool) for i in range(4)]

        text = on_each(mesh, body).lower(jnp.ones((2, 8))).as_text()
    lines = [line.strip() for line in text.splitlines() if "@b12x_" in line]
    assert "@b12x_open_order" in lines[0]
    token = lines[0].split(" ", 1)[0]
    for line in lines[1:]:
        result, arguments = line.split(" = ", 1)
        assert token in arguments.split("{")[0], (token, line)
        token = result.split(":")[0] + "#1"
        assert "output_operand_alias" in line


@every_kind
@SHARED
def test_a_call_outside_an_order_is_refused(kind, isolation):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp", isolation=isolation) as pool:
        step = on_each(mesh, lambda x: kind.call(x, pool))
        with pytest.raises(ValueError, match=r"inside `with pool.ordered\(\):`"):
            step.lower(jnp.ones((2, 8)))


@every_kind
def test_the_channel_of_an_order_fits_its_largest_message(kind):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp", isolation="executable") as pool:

        def body(x):
            with pool.ordered():
                return [kind.call(x[:size], pool) for size in (8, 1000, 64)]

        on_each(mesh, body)(jnp.ones((2, 1000)))
        assert [record.capacity for record in pool.records()] == [kind.message(1000)]


@every_kind
def test_two_orders_of_one_program_are_two_channels(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", isolation="executable") as pool:

        def body(x):
            results = []
            for _ in range(2):
                with pool.ordered():
                    results.append(kind.call(x, pool))
            return results

        for out in on_each(mesh, body)(parts):
            assert_same_bits(out, kind.expected(parts, 2))
        assert len(pool.records()) == 2


@every_kind
def test_a_function_jitted_once_has_a_program_in_each_order(kind):
    """A call site cached from another program must not bring that program's token along."""
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", isolation="executable") as pool:
        layer = jax.jit(lambda x: kind.call(x, pool))

        def body(x):
            with pool.ordered():
                return layer(x) + layer(x)

        for _ in range(2):
            step = on_each(mesh, lambda x: body(x))
            assert_same_bits(step(parts), kind.expected(parts, 2) * np.float32(2))


@every_kind
def test_lanes_never_share_a_channel(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", isolation="lane") as pool:

        def body(x):
            with pool.ordered():
                return kind.call(x, pool)

        once = on_each(mesh, body)  # one jitted function, called in two lanes
        again = on_each(mesh, lambda x: body(x))
        for lane in ("target", "draft"):
            with jax_b12x.lane(lane):
                for step in (once, again):
                    assert_same_bits(step(parts), kind.expected(parts, 2))
        # Two programs each: a lane's programs share, lanes do not.
        held = {record.lane: record.holders for record in pool.records()}
        assert held == {"target": 2, "draft": 2}


def test_a_lane_has_a_name():
    for name in ("", "-1", "two words", -1, None):
        with pytest.raises(ValueError, match="lane must be a name"), jax_b12x.lane(name):
            pass
