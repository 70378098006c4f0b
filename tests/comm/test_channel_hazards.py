"""What goes wrong when programs share a channel: each hazard, for every kind of pool."""

import random
import threading

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

ROUNDS = {"cpu": 500, "gpu": 10_000}


def chain(kind, pool, length):
    """``length`` calls, each on what the one before it gave, scaled back to keep its size."""

    def body(x):
        with pool.ordered():
            for _ in range(length):
                x = kind.call(x, pool) * x.dtype.type(0.5)
        return x

    return body


def chain_oracle(kind, parts, world_size, length):
    value = np.asarray(parts)
    for _ in range(length):
        value = kind.expected(value, world_size) * value.dtype.type(0.5)
    return value


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("length", [1, 6], ids=("eager", "captured"))
def test_target_and_draft_run_around_each_other_without_mixing(kind, platform, length):
    """Two executables, in random order from two threads."""
    mesh = mesh_of(2, platform)
    with kind.pool(mesh, "tp", timeout=20) as pool:
        runs = {}
        for seed, (name, shape) in enumerate((("target", (4, 512)), ("draft", (1, 96)))):
            parts = random_parts(seed, mesh, shape, jnp.float32)
            step = on_each(mesh, chain(kind, pool, length))
            runs[name] = step, parts, chain_oracle(kind, parts, 2, length)
            for _ in range(3):  # eager, captured, replayed
                assert_same_bits(step(parts), runs[name][2])

        failures = []

        def work(seed):
            order = random.Random(seed)
            try:
                for _ in range(ROUNDS[platform] // 2):
                    step, parts, expected = runs[order.choice(("target", "draft"))]
                    assert_same_bits(step(parts), expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        pool.check()


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("isolation", ["call_site", "executable", "lane"])
def test_independent_calls_of_one_program_do_not_meet(kind, platform, isolation):
    """No data dependence between them: XLA may run them at once, or in another order."""
    mesh = mesh_of(2, platform)
    parts = [random_parts(seed, mesh, (300 + seed,), jnp.float32) for seed in range(6)]
    with kind.pool(mesh, "tp", isolation=isolation, timeout=20) as pool:

        def body(*xs):
            with pool.ordered():
                return [kind.call(x * x.dtype.type(1.5), pool) for x in xs]

        step = on_each(mesh, body)
        scaled = [np.asarray(each) * np.float32(1.5) for each in parts]
        for _ in range(30):
            for out, each in zip(step(*parts), scaled, strict=True):
                assert_same_bits(out, kind.expected(each, 2))


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
def test_new_shapes_are_compiled_while_old_programs_go_on(kind, platform):
    mesh = mesh_of(2, platform)
    with kind.pool(mesh, "tp", timeout=20) as pool:
        step = on_each(mesh, chain(kind, pool, 6))
        seen = []
        for size in (8, 100, 33, 1000):
            seen.append(random_parts(size, mesh, (size,), jnp.float32))
            for _ in range(3):
                for parts in seen:
                    assert_same_bits(step(parts), chain_oracle(kind, parts, 2, 6))
        living = {record.id for record in pool.records() if record.holders}
        assert len(living) == 4 * 6


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
def test_donated_and_moving_buffers_are_read_where_they_are(kind, platform):
    mesh = mesh_of(2, platform)
    with kind.pool(mesh, "tp", timeout=20) as pool:
        step = on_each(mesh, chain(kind, pool, 6), donate_argnums=0)
        keep = []
        for seed in range(12):
            host = np.asarray(random_parts(seed, mesh, (257,), jnp.float32))
            # Other arrays come and go, so that replays see new addresses.
            keep.append(random_parts(100 + seed, mesh, (64 * (seed % 3 + 1),), jnp.float32))
            donated = jax.device_put(host, keep[-1].sharding)
            assert_same_bits(step(donated), chain_oracle(kind, host, 2, 6))
            if seed % 4 == 3:
                keep.clear()


@every_kind
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_program_compiled_again_never_gets_the_channel_of_a_living_one(kind, platform):
    mesh = mesh_of(2, platform)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    expected = kind.expected(parts, 2)
    with kind.pool(mesh, "tp", timeout=20) as pool:
        keeper = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(keeper(parts), expected)
        (held,) = (record.id for record in pool.records())
        bytes_before = None
        for cycle in range(200):
            step = on_each(mesh, lambda x: kind.call(x, pool) + 0)
            assert_same_bits(step(parts), expected + 0)
            alive = [record.id for record in pool.records() if record.holders]
            assert len(alive) == 2
            assert held in alive
            step.clear_cache()
            del step
            if cycle == 2:
                bytes_before = pool.bytes
        # The channel of a dropped executable is taken over whole: nothing grows.
        assert pool.bytes == bytes_before
        assert_same_bits(keeper(parts), expected)
        assert [record.state for record in pool.records() if record.id == held] == ["leased"]


@every_kind
@pytest.mark.multigpu
def test_two_hundred_programs_leave_device_memory_as_it_was(kind):
    from cuda.bindings import runtime

    def used():
        bytes_used = []
        for ordinal in range(2):
            runtime.cudaSetDevice(ordinal)
            _, free, total = runtime.cudaMemGetInfo()
            bytes_used.append(total - free)
        return bytes_used

    mesh = mesh_of(2, "gpu")
    parts = random_parts(0, mesh, (300_000,), jnp.float32)
    with kind.pool(mesh, "tp", timeout=20) as pool:
        for cycle in range(200):
            step = on_each(mesh, lambda x: kind.call(x, pool) + 0)
            jax.block_until_ready(step(parts))
            step.clear_cache()
            del step
            if cycle == 2:  # the first ones load modules
                before = used()
        assert used() == before
