"""Pools: what they are told, what they hold, checkpoint, rollback, close, memory."""

import gc
import io
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import (
    assert_same_bits,
    every_kind,
    mesh_of,
    on_each,
    random_parts,
    rank_order_sum,
)

from jax_b12x import _native, comm, config
from jax_b12x.comm.memory import ISOLATIONS, channel_bytes, lane_message_bytes


def drop(pool, step):
    """Drops an executable and waits until it is gone: a run that is in flight keeps it."""
    before = sum(record.holders for record in pool.records())
    step.clear_cache()
    gc.collect()
    deadline = time.monotonic() + 10
    while sum(record.holders for record in pool.records()) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@every_kind
def test_rollback_frees_exactly_what_came_after_the_checkpoint(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp") as pool:
        early = on_each(mesh, lambda x: kind.call(x, pool))
        early(parts)
        before = pool.records()
        checkpoint = pool.checkpoint()
        profiling = on_each(mesh, lambda x: kind.call(kind.call(x, pool), pool))
        profiling(parts)
        assert len(pool.records()) == 3
        drop(pool, profiling)
        assert [record.state for record in pool.records()] == [
            "leased",
            "quarantined",
            "quarantined",
        ]
        pool.rollback(checkpoint)
        assert pool.records() == before
        assert_same_bits(early(parts), kind.expected(parts, 2))
        later = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(later(parts), kind.expected(parts, 2))


@every_kind
def test_rollback_refuses_while_an_executable_is_alive(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp") as pool:
        checkpoint = pool.checkpoint()
        step = on_each(mesh, lambda x: kind.call(x, pool))
        step(parts)
        with pytest.raises(comm.RollbackRefusedError, match="held by executables that are alive"):
            pool.rollback(checkpoint)
        assert_same_bits(step(parts), kind.expected(parts, 2))
        drop(pool, step)
        pool.rollback(checkpoint)
        assert not pool.records()


@every_kind
def test_a_checkpoint_belongs_to_its_pool(kind):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp") as one, kind.pool(mesh, "tp") as other:
        assert one.name != other.name
        with pytest.raises(ValueError, match=f"is of pool '{one.name}', not of '{other.name}'"):
            other.rollback(one.checkpoint())


@every_kind
@pytest.mark.parametrize("transport", [None, "xla"])
def test_a_checkpoint_of_a_closed_pool_is_not_one_of_the_next_pool_of_its_name(kind, transport):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", transport=transport) as closed:
        before = closed.checkpoint()
    with kind.pool(mesh, "tp", transport=transport) as pool:
        assert pool.name == closed.name
        step = on_each(mesh, lambda x: kind.call(x, pool))
        step(parts)
        records = pool.records()
        with pytest.raises(ValueError, match=f"another pool that was named '{pool.name}'"):
            pool.rollback(before)
        assert pool.records() == records
        # Not for want of asking while it is held.
        if records:
            drop(pool, step)
            with pytest.raises(ValueError, match="another pool that was named"):
                pool.rollback(before)
            assert len(pool.records()) == len(records)


@pytest.mark.parametrize("wrong", [None, 0, ("tp2", 1, 0)])
def test_what_is_no_checkpoint_is_refused(wrong):
    with (
        comm.ChannelPool(mesh_of(2), "tp") as pool,
        pytest.raises(TypeError, match=r"checkpoint must be what pool.checkpoint\(\) returned"),
    ):
        pool.rollback(wrong)


@every_kind
def test_a_closed_pool_refuses_its_programs_by_name_and_a_second_close_does_nothing(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="closing") as pool:
        step = on_each(mesh, lambda x: kind.call(x, pool))
        out = step(parts)  # dispatched; close waits for it
    assert_same_bits(out, kind.expected(parts, 2))
    assert pool.closed
    pool.close()
    with pytest.raises(Exception, match=r"FAILED_PRECONDITION.*pool 'closing' was closed"):
        jax.block_until_ready(step(parts))
    with pytest.raises(comm.ChannelError, match="pool 'closing' is closed"):
        pool.checkpoint()
    with pytest.raises(comm.ChannelError, match="pool 'closing' is closed; make a new one"), pool:
        pass
    # The name is free again.
    with kind.pool(mesh, "tp", name="closing") as pool:
        step = on_each(mesh, lambda x: kind.call(x, pool))
        assert_same_bits(step(parts), kind.expected(parts, 2))


@every_kind
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_close_waits_for_a_program_whose_results_were_dropped(kind, isolation):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    seen = {}

    def come_late(rank, x):
        time.sleep(0.3 * int(rank))
        return x

    def see(rank, out):
        seen[int(rank)] = np.array(out)
        return out

    with kind.pool(mesh, "tp", isolation=isolation, timeout=10) as pool:

        def body(x):
            rank = jax.lax.axis_index("tp")
            with pool.ordered():
                out = kind.call(jax.pure_callback(come_late, x, rank, x), pool)
            return jax.pure_callback(see, out, rank, out)

        step = on_each(mesh, body).lower(parts).compile()
        step(parts)
    assert_same_bits([seen.get(rank) for rank in range(2)], kind.expected(parts, 2))


def test_close_waits_whatever_mesh_and_settings_are_in_force_around_it():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    ended = []

    def end(rank, x):
        time.sleep(0.3 * int(rank))
        ended.append(int(rank))
        return x

    def body(x):
        return jax.pure_callback(end, x, jax.lax.axis_index("tp"), comm.all_reduce(x, pool))

    def close(x):
        pool.close()
        return x

    for around in ("mesh", "disable_jit", "trace"):
        ended.clear()
        pool = comm.ChannelPool(mesh, "tp")
        on_each(mesh, body).lower(parts).compile()(parts)
        if around == "mesh":
            with jax.set_mesh(jax.make_mesh((4,), ("other",))):
                pool.close()
        elif around == "disable_jit":
            with jax.disable_jit():
                pool.close()
        else:
            jax.jit(close).trace(1.0)
        assert sorted(ended) == [0, 1], around


CLOSED_AT_EXIT = """
import atexit, os, time
import jax, jax.numpy as jnp
from jax_b12x import comm

mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
pool = comm.ChannelPool(mesh, "tp")
atexit.register(pool.close)


def come_late(rank, x):
    time.sleep(0.3 * int(rank))
    return x


def end(rank, x):
    os.write(1, b"ended %d\\n" % int(rank))  # at once: both ranks may be here
    return x


def body(x):
    rank = jax.lax.axis_index("tp")
    x = jax.pure_callback(come_late, x, rank, x)
    return jax.pure_callback(end, x, rank, comm.all_reduce(x, pool))


x = jax.device_put(jnp.ones((2, 8)), jax.NamedSharding(mesh, jax.P("tp")))
jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P("tp"),
                      check_vma=False)).lower(x).compile()(x)
"""


def test_close_waits_when_the_process_exits():
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_AT_EXIT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ended 0", "ended 1"], done.stderr
    assert "Error" not in done.stderr, done.stderr


@every_kind
def test_an_abandoned_channel_is_quarantined_and_not_freed_alone(kind):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp") as pool:
        step = on_each(mesh, lambda x: kind.call(x, pool))
        step(random_parts(0, mesh, (64,), jnp.float32))
        bytes_held = pool.bytes
        drop(pool, step)
        del step
        assert [record.state for record in pool.records()] == ["quarantined"]
        assert pool.bytes == bytes_held


@every_kind
def test_describe_shows_owner_call_site_lane_bytes_and_state(kind):
    mesh = mesh_of(2)
    with kind.pool(mesh, "tp") as pool:

        def decode_step(x):
            return kind.call(x, pool)

        step = jax.jit(
            jax.shard_map(
                decode_step,
                mesh=mesh,
                in_specs=jax.P("tp"),
                out_specs=jax.P("tp"),
                check_vma=False,
            )
        )
        step(jnp.ones((2, 1000)))
        shown = io.StringIO()
        pool.describe(shown)
    text = shown.getvalue()
    message = kind.message(1000)
    sizes = f"{message:,}", f"{channel_bytes(message, 2):,}"
    for word in ("jit_decode_step", "default", *sizes, "leased"):
        assert word in text, text


def test_describe_keeps_its_words_whole_on_a_terminal_of_80_columns(monkeypatch, capsys):
    mesh = mesh_of(2)
    monkeypatch.setenv("COLUMNS", "80")
    with comm.ChannelPool(mesh, "tp") as pool:

        def all_reduce_of_a_program_with_a_long_name(x):
            return comm.all_reduce(x, pool)

        mapped = jax.shard_map(
            all_reduce_of_a_program_with_a_long_name,
            mesh=mesh,
            in_specs=jax.P("tp"),
            out_specs=jax.P("tp"),
            check_vma=False,
        )
        step = jax.jit(mapped)
        step(jnp.ones((2, 1_000_000)))
        drop(pool, step)
        pool.describe()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "quarantined" in text
    assert "…" not in text


MESSAGES = [tokens * 6144 * 2 for tokens in (1, 2, 4, 8, 16, 32, 64, 128)]
CALL_SITES = 121
LIMIT = 256 * 2**20


def test_a_large_model_fits_in_256_mb_a_rank():
    programs = [[size] * CALL_SITES for size in MESSAGES]
    needs = {mode: comm.required_bytes(programs, 8, mode) for mode in ISOLATIONS}
    assert max(needs["executable"], needs["lane"]) <= LIMIT < needs["call_site"]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_large_model_is_compiled_within_its_limit_or_told_what_would_fit(isolation):
    """121 call sites of hidden 6144, 1 to 128 tokens in eight executables, 8 ranks."""
    mesh = mesh_of(8)
    with comm.ChannelPool(
        mesh, "tp", isolation=isolation, max_bytes=LIMIT, cutoff="2MB", timeout=120
    ) as pool:

        def body(x):
            with pool.ordered():
                for _ in range(CALL_SITES):
                    x = comm.all_reduce(x, pool) / 8
            return x

        steps = []

        def compile_all():
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
                message = jnp.ones((8, tokens, 6144), jnp.bfloat16)
                steps.append(on_each(mesh, body).lower(message).compile())

        if isolation == "call_site":
            with pytest.raises(Exception, match="isolation='executable' would fit"):
                compile_all()
        else:
            compile_all()
            same = jnp.ones((8, 1, 6144), jnp.bfloat16)
            assert_same_bits(steps[0](same), same)
        assert 0 < pool.bytes <= LIMIT


@every_kind
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_message_that_no_channel_could_carry_is_refused_when_it_is_traced(kind, isolation):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (1200,), jnp.float32)
    capacity = kind.message(1200)
    needed = channel_bytes(lane_message_bytes(capacity) if isolation == "lane" else capacity, 2)
    for max_bytes in (needed - 1, needed):
        with kind.pool(mesh, "tp", isolation=isolation, max_bytes=max_bytes) as pool:

            def body(x, pool=pool):
                with pool.ordered():
                    return kind.call(x, pool)

            step = on_each(mesh, body)
            if max_bytes >= needed:
                assert_same_bits(step(parts), kind.expected(parts, 2))
                continue
            with pytest.raises(ValueError, match=f"takes {needed} bytes.*max_bytes={max_bytes}"):
                step.trace(parts)


@pytest.mark.parametrize("message", [1, 15, 16, 17, 4096, 100_000])
@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_python_and_the_runtime_agree_on_bytes(message, world_size):
    assert channel_bytes(message, world_size) == _native.host().channel_bytes(message, world_size)


@pytest.mark.parametrize(
    ("message_bytes", "world_size", "error", "message"),
    [
        (-1, 4, ValueError, "message_bytes must be a whole number of bytes, 0 or more, not -1"),
        (8, 0, ValueError, "world_size must be a whole number of ranks, 1 or more, not 0"),
        (8.5, 2, TypeError, "message_bytes must be a whole number"),
        (8, "2", TypeError, "world_size must be a whole number"),
    ],
)
def test_bytes_are_counted_of_whole_numbers_alone(message_bytes, world_size, error, message):
    with pytest.raises(error, match=message):
        channel_bytes(message_bytes, world_size)
    with pytest.raises(error, match=message):
        comm.required_bytes([[message_bytes]], world_size, "call_site")


def test_the_bytes_of_an_isolation_that_there_is_not_are_refused():
    with pytest.raises(ValueError, match=r"isolation must be one of .*, not 'foo'"):
        comm.required_bytes([[8]], 2, "foo")


def test_lanes_have_channels_in_powers_of_two():
    assert [lane_message_bytes(size) for size in (1, 4096, 4097, 8192)] == [4096, 4096, 8192, 8192]


def test_the_environment_sets_what_the_maker_of_a_pool_leaves_open(monkeypatch):
    mesh = mesh_of(2)
    monkeypatch.setenv("B12X_ONESHOT_MAX_SIZE", "3KB")
    monkeypatch.setenv("B12X_ONESHOT_SINGLE_CHANNEL", "1")
    monkeypatch.setenv("B12X_ONESHOT_TIMEOUT_MS", "1500")
    with comm.ChannelPool(mesh, "tp") as pool:
        assert (pool.cutoff, pool.isolation, pool.timeout) == (3072, "lane", 1.5)
    with comm.ChannelPool(mesh, "tp", cutoff=7, isolation="call_site", timeout=2) as pool:
        assert (pool.cutoff, pool.isolation, pool.timeout) == (7, "call_site", 2)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("B12X_ONESHOT_MAX_SIZE", "512 potatoes"),
        ("B12X_ONESHOT_MAX_SIZE", "-1"),
        ("B12X_ONESHOT_MAX_SIZE", "KB"),
        ("B12X_ONESHOT_SINGLE_CHANNEL", "yes"),
        ("B12X_ONESHOT_TIMEOUT_MS", "0"),
        ("B12X_ONESHOT_TIMEOUT_MS", "1.5"),
        ("B12X_ONESHOT_TIMEOUT_MS", "3600001"),
    ],
)
def test_the_environment_is_refused_with_the_allowed_forms(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(config.ConfigError, match=f"{variable}='{text}' is not understood; allowed"):
        comm.ChannelPool(mesh_of(2), "tp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "ep"}, "axis must name axes of the mesh"),
        ({"isolation": "stream"}, "isolation must be one of call_site, executable, lane"),
        ({"timeout": 0}, "timeout must be between"),
        ({"timeout": float("nan")}, "timeout must be finite"),
        ({"timeout": 3601}, "timeout must be between"),
        ({"axis": ()}, "axis must name axes of the mesh"),
        ({"axis": ("tp", "tp")}, "names an axis twice"),
        ({"max_bytes": 2**70}, "max_bytes must be a whole number of bytes"),
        ({"max_bytes": "1 MB"}, "max_bytes='1 MB' is not understood; allowed: bytes, or a size"),
        ({"max_bytes": 12287, "isolation": "lane"}, "at least 12288.*isolation='lane'"),
        ({"max_bytes": "4KB"}, "max_bytes must be at least 4352"),
        ({"cutoff": 2**63}, "cutoff must be a whole number of bytes"),
        ({"max_bytes": 4351}, "max_bytes must be at least 4352, which the smallest channel of 2"),
        ({"cutoff": "lots"}, "cutoff='lots' is not understood"),
        ({"cutoff": -1}, "cutoff must be a whole number of bytes, 0 or more, not -1"),
        ({"transport": "smoke"}, "transport must be one of peer, ipc, host, xla"),
    ],
)
def test_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        comm.ChannelPool(mesh_of(2), **{"axis": "tp", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": None}, "axis must be the name of an axis of the mesh .*, not None"),
        ({"axis": 0}, "axis must be the name of an axis of the mesh .*, not 0"),
        ({"axis": (0,)}, "axis must be the name of an axis of the mesh"),
        ({"name": 5}, "name must be a text"),
        ({"name": ""}, "name must be a text that is not empty"),
        ({"timeout": "5"}, "timeout must be a number, not '5'"),
        ({"timeout": True}, "timeout must be a number, not True"),
        ({"max_bytes": 1e6}, "max_bytes must be a whole number of bytes"),
        ({"max_bytes": True}, "max_bytes must be a whole number of bytes"),
        ({"cutoff": 1.5}, "cutoff must be a whole number of bytes, 0 or more, not 1.5"),
        ({"cutoff": False}, "cutoff must be a whole number of bytes"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(arguments, message):
    with pytest.raises(TypeError, match=message):
        comm.ChannelPool(mesh_of(2), **{"axis": "tp", **arguments})


def test_sizes_may_be_numbers_of_numpy_or_texts():
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp", max_bytes="1MB", cutoff=np.int64(64)) as pool:
        assert (pool.max_bytes, pool.cutoff) == (2**20, 64)


def test_the_smallest_lane_pool_serves_the_smallest_messages():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (4,), jnp.float32)
    with comm.ChannelPool(mesh, "tp", isolation="lane", max_bytes=12288) as pool:
        step = on_each(mesh, pool.ordered()(lambda x: comm.all_reduce(x, pool)))
        assert_same_bits(step(parts), rank_order_sum(parts, 2))
        assert pool.bytes == pool.max_bytes


def test_a_full_pool_says_what_dropped_executables_have_left_and_how_to_free_it():
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp", max_bytes=2 * channel_bytes(400, 2)) as pool:
        checkpoint = pool.checkpoint()

        def step_of(size):
            return on_each(mesh, lambda x: comm.all_reduce(x, pool)), jnp.ones((2, size))

        for size in (100, 90):
            step, x = step_of(size)
            step(x)
            drop(pool, step)
        step, x = step_of(10)
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"2 channels already take .* 2 of them \(.* KiB\) are left by executables that "
            r"are gone: rollback\(\) to an earlier checkpoint frees them",
        ):
            step(x)
        pool.rollback(checkpoint)
        np.testing.assert_array_equal(step(x), np.full((2, 10), 2.0))


def test_a_lane_that_the_environment_chose_is_named_where_it_is_in_the_way(monkeypatch):
    mesh = mesh_of(2)
    monkeypatch.setenv("B12X_ONESHOT_SINGLE_CHANNEL", "1")
    with comm.ChannelPool(mesh, "tp") as pool:
        step = on_each(mesh, lambda x: comm.all_reduce(x, pool))
        with pytest.raises(
            ValueError, match=r"isolation='lane' \(by B12X_ONESHOT_SINGLE_CHANNEL=1\), where"
        ):
            step(jnp.ones((2, 8)))


@pytest.mark.parametrize("transport", ["peer", "ipc"])
def test_a_transport_that_is_forced_never_falls_back(transport):
    with pytest.raises(
        comm.TransportError, match=f"transport='{transport}' cannot serve this mesh"
    ):
        comm.ChannelPool(mesh_of(2), "tp", transport=transport)


def test_xla_can_be_chosen_and_gives_the_sum():
    mesh = mesh_of(2)
    with comm.ChannelPool(mesh, "tp", transport="xla", isolation="executable") as pool:

        def body(x):
            with pool.ordered():
                return comm.all_reduce(x, pool)

        step = on_each(mesh, body)
        np.testing.assert_array_equal(step(jnp.ones((2, 8))), np.full((2, 8), 2.0))
        assert not pool.records()
        pool.rollback(pool.checkpoint())


def test_a_pool_warns_where_the_cpu_client_has_fewer_than_two_threads_a_device(monkeypatch):
    mesh = mesh_of(2)
    monkeypatch.setenv("NPROC", "3")
    with (
        pytest.warns(UserWarning, match="3 threads for 2 devices.*Set NPROC=64"),
        comm.ChannelPool(mesh, "tp"),
    ):
        pass
    monkeypatch.setenv("NPROC", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with comm.ChannelPool(mesh, "tp"):
            pass
