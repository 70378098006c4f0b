"""A rank that never arrives: a bounded wait, an error that says who, and nobody else is harmed."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import PLATFORMS, assert_same_bits, every_kind, mesh_of, on_each, random_parts
from jax import lax
from jax._src import dispatch

from jax_b12x import comm
from jax_b12x.comm import lifetime

TIMEOUT = 0.5


def lost(kind, pool):
    """A program whose last rank goes another way and never comes to the call."""

    def body(x):
        alone = lax.axis_index("tp") == pool.world_size - 1
        return lax.cond(alone, lambda x: x, lambda x: kind.call(x, pool), x)

    return body


def results_by_device(array):
    return [shard.data for shard in sorted(array.addressable_shards, key=lambda s: s.device.id)]


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_others_get_an_error_within_the_timeout_and_nan(kind, platform):
    mesh = mesh_of(2, platform)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="faulty", timeout=TIMEOUT) as pool:
        healthy = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(healthy(parts), kind.expected(parts, 2))
        step = on_each(mesh, lost(kind, pool)).lower(parts).compile()

        begun = time.monotonic()
        message = (
            r"pool 'faulty', channel \d+ \(jit_of_one, call site \d+\): rank 1 did not arrive "
            r"within the timeout of 500 ms"
        )
        if platform == "cpu":
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(step(parts))
        else:
            out = step(parts)
            with pytest.raises(comm.ChannelError, match=message):
                pool.block_until_ready(out)
            assert np.isnan(results_by_device(out)[0]).all()
        assert time.monotonic() - begun < TIMEOUT + 1

        # That channel is poisoned, now and for ever; the other one is not. It is reported once.
        if platform == "cpu":
            with pytest.raises(comm.ChannelError, match=message):
                pool.check()
        pool.check()
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(step(parts))
        states = sorted(record.state for record in pool.records())
        assert states == ["leased", "poisoned"]
        for _ in range(10):
            out = pool.block_until_ready(healthy(parts))
            assert_same_bits(out, kind.expected(parts, 2))
        fresh = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(fresh(parts), kind.expected(parts, 2))
    assert pool.closed


@every_kind
@pytest.mark.parametrize("world_size", [3, 4])
def test_the_error_names_the_rank_that_is_missing(kind, world_size):
    mesh = mesh_of(world_size)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", timeout=TIMEOUT) as pool:
        step = on_each(mesh, lost(kind, pool))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"rank {world_size - 1} did not"):
            jax.block_until_ready(step(parts))


@every_kind
def test_a_program_that_raises_before_the_call_does_not_hang_the_other_rank(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)

    def explode(x, rank):
        if rank == 1:
            raise RuntimeError("planted")
        return x

    with kind.pool(mesh, "tp", timeout=TIMEOUT) as pool:

        def body(x):
            rank = lax.axis_index("tp")
            x = jax.pure_callback(explode, jax.typeof(x), x, rank)
            return kind.call(x, pool)

        step = on_each(mesh, body).lower(parts).compile()
        begun = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"planted|rank 1 did not arrive"):
            jax.block_until_ready(step(parts))
        # Whichever error came first, the channel's own follows in time.
        while not any(record.state == "poisoned" for record in pool.records()):
            assert time.monotonic() - begun < TIMEOUT + 1
            time.sleep(0.01)
        with pytest.raises(comm.ChannelError, match="rank 1 did not arrive"):
            pool.check()
    dispatch.runtime_tokens.clear()  # JAX would report the planted error again when it exits


@every_kind
def test_who_waits_on_a_channel_that_its_pool_takes_back_is_released(kind, monkeypatch):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    # Nothing is dispatched while a pool is being closed; if it is after all, this is what it meets.
    monkeypatch.setattr(lifetime, "wait_for_dispatched", lambda devices: None)
    with kind.pool(mesh, "tp", timeout=10) as pool:
        step = on_each(mesh, lost(kind, pool)).lower(parts).compile()
        first, second = results_by_device(step(parts))
        second.block_until_ready()
        time.sleep(0.2)  # the first one comes to its call
    # Not that the other one did not arrive within the timeout.
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION.*was closed"):
        first.block_until_ready()
    dispatch.runtime_tokens.clear()  # JAX would report the error again when it exits


@every_kind
@pytest.mark.multigpu
def test_a_program_of_many_lost_calls_ends_soon(kind):
    """Each call site has a channel of its own; they must not wait one timeout after another."""
    mesh = mesh_of(2, "gpu")
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", timeout=TIMEOUT) as pool:

        def body(x):
            for _ in range(50):
                x = lost(kind, pool)(x)
            return x

        step = on_each(mesh, body).lower(parts).compile()
        begun = time.monotonic()
        with pytest.raises(comm.ChannelError, match="rank 1 did not arrive"):
            pool.block_until_ready(step(parts))
        assert time.monotonic() - begun < TIMEOUT + 1


@every_kind
def test_each_fault_is_reported_once_and_its_program_stays_refused(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", timeout=0.1) as pool:
        for fault in range(2):
            step = on_each(mesh, lost(kind, pool)).lower(parts).compile()
            with pytest.raises(jax.errors.JaxRuntimeError, match="did not arrive"):
                jax.block_until_ready(step(parts))
            with pytest.raises(comm.ChannelError) as raised:
                pool.check()
            assert str(raised.value).count("did not arrive") == 1
            pool.check()
            for _ in range(2):
                with pytest.raises(jax.errors.JaxRuntimeError, match="did not arrive"):
                    jax.block_until_ready(step(parts))
            assert [record.state for record in pool.records()].count("poisoned") == fault + 1


@every_kind
def test_a_poisoned_channel_is_not_handed_on(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", timeout=TIMEOUT) as pool:
        step = on_each(mesh, lost(kind, pool))
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(step(parts))
        (poisoned,) = (record.id for record in pool.records() if record.state == "poisoned")
        step.clear_cache()
        again = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(again(parts), kind.expected(parts, 2))
        assert poisoned not in [record.id for record in pool.records() if record.holders]
        assert len(pool.records()) == 2
