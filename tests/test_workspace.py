"""Workspaces: who holds which, lanes, the lock, rollback. On CPU devices leases are the same."""

import gc
import io
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_inputs import random_tokens, random_weights

import jax_b12x
from jax_b12x import moe, workspace

HIDDEN, EXPERTS, TOP_K = 64, 4, 2
# A compiled program that fails before it is dispatched raises the second one.
REFUSED = (jax.errors.JaxRuntimeError, ValueError)


@pytest.fixture(scope="module")
def arguments():
    rng = np.random.default_rng(0)
    weights = random_weights(rng, hidden=HIDDEN, intermediate=32, num_experts=EXPERTS)
    tokens = random_tokens(
        rng, num_tokens=3, hidden=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, dtype="bfloat16"
    )
    return weights, *tokens


def compile_step(arguments, *, name="step", sites=1):
    """Compiles a program of a name with so many fused MoE call sites."""
    weights, *tokens = arguments

    def step(x, ids, routes):
        for _ in range(sites):
            x = x + moe.fused_moe(x, weights, ids, routes)
        return x

    step.__name__ = name
    return jax.jit(step).lower(*tokens).compile()


def holders(pool):
    return [(r.program, r.lane, r.state) for r in pool.records() if r.platform == "cpu"]


@pytest.fixture
def pool():
    with workspace.WorkspacePool() as opened, opened.use():
        yield opened


def test_each_call_site_of_each_executable_has_its_own(pool, arguments):
    first = compile_step(arguments, sites=2)
    second = compile_step(arguments)
    records = pool.records()
    assert len(records) == 3
    assert len({record.site for record in records[:2]}) == 2
    assert records[0].executable == records[1].executable != records[2].executable
    assert all(record.holders == 1 for record in records)
    assert pool.bytes == 3 * 256
    del first, second


def test_two_call_sites_of_one_inner_function_do_not_share(pool, arguments):
    weights, x, ids, routes = arguments

    @jax.jit
    def inner(x):
        return moe.fused_moe(x, weights, ids, routes)

    compiled = jax.jit(lambda x: inner(inner(x))).lower(x).compile()
    compiled(x)
    assert [record.holders for record in pool.records()] == [1, 1]


def test_a_lease_ends_with_its_executable_and_the_next_takes_over(pool, arguments):
    first = compile_step(arguments)
    assert holders(pool) == [("jit_step", "default", "leased")]
    del first
    gc.collect()
    assert holders(pool) == [("jit_step", "default", "idle")]
    second = compile_step(arguments, name="other")
    assert holders(pool) == [("jit_other", "default", "leased")]
    assert np.isfinite(np.asarray(second(*arguments[1:]), np.float32)).all()


def test_every_device_of_a_program_is_in_the_table(pool, arguments):
    weights, *tokens = arguments
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    both = [jax.device_put(jnp.concatenate([t, t]), NamedSharding(mesh, P("d"))) for t in tokens]
    step = jax.jit(
        jax.shard_map(
            lambda x, i, r: moe.fused_moe(x, weights, i, r),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
        )
    )
    jax.block_until_ready(step(*both))
    assert [record.devices for record in pool.records()] == [(0, 1)]
    table = io.StringIO()
    pool.describe(table)
    assert "cpu:0, cpu:1" in table.getvalue()
    assert "leased" in table.getvalue()


def test_eager_calls_lease_a_workspace_too(pool, arguments):
    weights, *tokens = arguments
    moe.fused_moe(tokens[0], weights, *tokens[1:])
    assert holders(pool) == [("jit_b12x_moe", "default", "leased")]


def test_a_call_that_keeps_nothing_leases_nothing(pool, arguments):
    weights, x, ids, routes = arguments
    plan = moe.plan(
        "w4a16",
        num_tokens=3,
        hidden=HIDDEN,
        intermediate=32,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dtype=x.dtype,
        implementation="split",
    )
    assert plan.workspace_bytes == 0
    moe.fused_moe(x, weights, ids, routes, plan=plan)
    assert pool.records() == []


def test_one_function_called_in_two_lanes_is_two_programs(arguments):
    weights, *tokens = arguments
    step = jax.jit(lambda x, i, r: moe.fused_moe(x, weights, i, r))
    with workspace.WorkspacePool(isolation="lane") as pool, pool.use():
        for lane in ("target", "draft", "target"):
            with jax_b12x.lane(lane):
                step(*tokens)
        assert sorted(record.lane for record in pool.records()) == ["draft", "target"]
        assert all(record.holders == 1 for record in pool.records())


def test_programs_of_one_lane_share_and_lanes_never_do(arguments):
    with workspace.WorkspacePool(isolation="lane") as pool, pool.use():
        alive = []
        for lane in ("target", "draft"):
            with jax_b12x.lane(lane):
                alive += [compile_step(arguments, name=name, sites=2) for name in ("a", "b")]
        records = pool.records()
        assert [record.lane for record in records] == ["target", "target", "draft", "draft"]
        # Each is held by one call site of `a` and one of `b`, never by two of one program.
        assert [record.holders for record in records] == [2, 2, 2, 2]


def test_programs_of_one_name_do_not_share_since_they_may_be_one_executable(arguments):
    with workspace.WorkspacePool(isolation="lane") as pool, pool.use():
        alive = [compile_step(arguments), compile_step(arguments)]
        assert [record.holders for record in pool.records()] == [1, 1]
        del alive


@pytest.mark.parametrize("lane", ["draft", "default"])
def test_a_lane_that_was_not_configured_is_refused_and_those_there_are_named(arguments, lane):
    with workspace.WorkspacePool(lanes=("target", "verify")) as pool, pool.use():
        with (
            jax_b12x.lane(lane),
            pytest.raises(ValueError, match=rf"'{lane}'.*'target', 'verify'"),
        ):
            compile_step(arguments)
        with jax_b12x.lane("target"):
            compile_step(arguments)


@pytest.mark.parametrize("name", [-1, 0, "", "two words", "-1", None, b"draft"])
def test_what_is_not_a_name_is_no_lane(name):
    with pytest.raises(ValueError, match=r"must be .*'target' or 'draft'"), jax_b12x.lane(name):
        pass
    with pytest.raises(ValueError, match=r"must be .*'target' or 'draft'"):
        workspace.WorkspacePool(lanes=("target", name))


def test_a_lane_that_is_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"lanes must be different names, not \('a', 'b', 'a'\)"):
        workspace.WorkspacePool(lanes=("a", "b", "a"))


def test_a_program_that_was_stored_is_refused_in_a_lane_that_is_not_there(arguments):
    weights, *tokens = arguments
    stable = jax.export.DisabledSafetyCheck.custom_call(moe.TARGET)
    with workspace.WorkspacePool(name="stored") as pool, pool.use(), jax_b12x.lane("draft"):
        exported = jax.export.export(
            jax.jit(lambda x, i, r: moe.fused_moe(x, weights, i, r)), disabled_checks=[stable]
        )(*tokens)
        expected = exported.call(*tokens)
    again = jax.export.deserialize(exported.serialize())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"WorkspacePool\(name='stored'\)"):
        jax.block_until_ready(again.call(*tokens))
    with (
        workspace.WorkspacePool(name="stored", lanes=("target",)),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"lane 'draft'.* lanes are 'target'"),
    ):
        jax.block_until_ready(again.call(*tokens))
    with workspace.WorkspacePool(name="stored") as pool:
        np.testing.assert_array_equal(again.call(*tokens), expected)
        assert holders(pool)[0][1:] == ("draft", "leased")


def test_a_locked_pool_refuses_growth_and_names_call_site_and_bytes(pool, arguments):
    kept = compile_step(arguments)
    pool.lock()
    assert pool.locked
    kept_again = None
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"call site \d+ of jit_grown .*needs 256 bytes more"
    ):
        kept_again = compile_step(arguments, name="grown")
    pool.unlock()
    kept_again = compile_step(arguments, name="grown")
    assert len(pool.records()) == 2
    del kept, kept_again


def test_a_locked_pool_lets_programs_take_over_what_is_idle(pool, arguments):
    dropped = compile_step(arguments)
    del dropped
    gc.collect()
    pool.lock()
    kept = compile_step(arguments, name="next")
    assert holders(pool) == [("jit_next", "default", "leased")]
    del kept


def test_a_locked_pool_refuses_another_device(pool, arguments):
    weights, *tokens = arguments
    step = jax.jit(lambda x, i, r: moe.fused_moe(x, weights, i, r))
    kept = step.lower(*tokens).compile()
    pool.lock()
    with pytest.raises(jax.errors.JaxRuntimeError, match="256 bytes more on device 0"):
        jax.block_until_ready(kept(*tokens))
    pool.unlock()
    jax.block_until_ready(kept(*tokens))


def test_max_bytes_is_a_limit_and_the_error_adds_up(arguments):
    with workspace.WorkspacePool(max_bytes=600) as pool, pool.use():
        kept = compile_step(arguments, sites=2)
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"needs 256 bytes .*512 of max_bytes=600"
        ):
            compile_step(arguments, name="other")
        del kept


def test_rollback_frees_what_was_leased_since_and_nothing_else(pool, arguments):
    kept = compile_step(arguments, name="kept")
    checkpoint = pool.checkpoint()
    disposable = compile_step(arguments, name="disposable", sites=3)
    jax.block_until_ready(disposable(*arguments[1:]))
    assert pool.bytes == 4 * 256
    del disposable
    pool.rollback(checkpoint)
    assert holders(pool) == [("jit_kept", "default", "leased")]
    assert pool.bytes == 256
    jax.block_until_ready(kept(*arguments[1:]))
    pool.rollback(checkpoint)  # there is nothing left to do


def test_rollback_refuses_while_an_executable_is_alive(pool, arguments):
    checkpoint = pool.checkpoint()
    alive = compile_step(arguments)
    with pytest.raises(workspace.WorkspaceRollbackError, match="jit_step"):
        pool.rollback(checkpoint)
    jax.block_until_ready(alive(*arguments[1:]))
    del alive
    pool.rollback(checkpoint)
    assert pool.records() == []


def test_a_checkpoint_of_another_pool_is_refused(pool):
    with (
        workspace.WorkspacePool(name="another") as other,
        pytest.raises(ValueError, match="'another'"),
    ):
        pool.rollback(other.checkpoint())


def test_a_checkpoint_of_a_closed_pool_is_not_one_of_the_next_pool_of_its_name(arguments):
    with workspace.WorkspacePool(name="twice") as closed:
        before = closed.checkpoint()
    with workspace.WorkspacePool(name="twice") as pool, pool.use():
        step = compile_step(arguments)
        jax.block_until_ready(step(*arguments[1:]))
        del step
        records = pool.records()
        with pytest.raises(ValueError, match="another pool that was named 'twice'"):
            pool.rollback(before)
        with pytest.raises(TypeError, match=r"must be what pool.checkpoint\(\) returned"):
            pool.rollback(None)
        assert [r.id for r in pool.records()] == [r.id for r in records] != []


def test_a_closed_pool_refuses_its_programs_and_new_ones(arguments):
    opened = workspace.WorkspacePool(name="short_lived")
    with opened.use():
        step = compile_step(arguments)
    jax.block_until_ready(step(*arguments[1:]))
    opened.close()
    opened.close()
    with pytest.raises(REFUSED, match="'short_lived' was closed"):
        jax.block_until_ready(step(*arguments[1:]))
    with pytest.raises(workspace.WorkspaceError, match="closed"), opened.use():
        pass
    workspace.WorkspacePool(name="short_lived").close()


def test_close_waits_for_a_program_whose_results_were_dropped(arguments):
    weights, *tokens = arguments
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    both = [jax.device_put(jnp.concatenate([t, t]), NamedSharding(mesh, P("d"))) for t in tokens]
    ended = []

    def come_late(rank, x):
        time.sleep(0.3 * int(rank))
        return x

    def end(rank, x):
        ended.append(int(rank))
        return x

    def body(x, ids, routes):
        rank = jax.lax.axis_index("d")
        x = jax.pure_callback(come_late, x, rank, x)
        return jax.pure_callback(end, x, rank, moe.fused_moe(x, weights, ids, routes))

    with workspace.WorkspacePool() as pool, pool.use():
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        step = jax.jit(mapped).lower(*both).compile()
        step(*both)
    assert sorted(ended) == [0, 1]


def test_a_function_outlives_its_pool_and_goes_on_in_the_next_one_of_its_name(arguments):
    weights, x, ids, routes = arguments
    jitted = jax.jit(lambda x: moe.fused_moe(x, weights, ids, routes))
    for _ in range(2):
        with workspace.WorkspacePool(name="again") as pool, pool.use():
            jax.block_until_ready(jitted(x))
            jax.block_until_ready(moe.fused_moe(x, weights, ids, routes))
            assert [record.holders for record in pool.records()] == [1, 1]
    jax.block_until_ready(jitted(x))


def test_two_open_pools_have_two_names():
    with workspace.WorkspacePool(name="one"), pytest.raises(ValueError, match="open already"):
        workspace.WorkspacePool(name="one")
    with workspace.WorkspacePool() as first, workspace.WorkspacePool() as second:
        assert first.name != second.name


def test_the_default_pool_is_there_and_cannot_be_closed(arguments):
    assert workspace.default() is workspace.default()
    before = len(workspace.default().records())
    kept = compile_step(arguments, name="by_default")
    programs = [record.program for record in workspace.default().records()]
    assert "jit_by_default" in programs
    assert len(programs) in (before, before + 1)  # it may take over what others have left
    del kept
    with pytest.raises(workspace.WorkspaceError, match="stays open"):
        workspace.default().close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"isolation": "executable"}, "isolation"),
        ({"lanes": "target"}, "lanes"),
        ({"lanes": ()}, "lanes"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": "lots"}, "max_bytes='lots' is not understood"),
        ({"timeout": float("nan")}, "timeout must be finite"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        workspace.WorkspacePool(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_bytes": 1.5}, "max_bytes must be a whole number of bytes, 1 or more, not 1.5"),
        ({"timeout": "5"}, "timeout must be a number, not '5'"),
        ({"timeout": True}, "timeout must be a number, not True"),
        ({"name": 5}, "name must be a text that is not empty, or None, not 5"),
    ],
)
def test_arguments_of_another_type_are_named(wrong, message):
    with pytest.raises(TypeError, match=message):
        workspace.WorkspacePool(**wrong)


def test_a_limit_may_be_a_text():
    with workspace.WorkspacePool(max_bytes="2KB") as pool:
        assert pool.max_bytes == 2048


PROGRAM = """
import sys
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
sys.path.insert(0, sys.argv[2])
from moe_inputs import random_tokens, random_weights
import jax_b12x
from jax_b12x import moe, workspace

rng = np.random.default_rng(0)
weights = random_weights(rng, hidden=64, intermediate=32, num_experts=4)
tokens = random_tokens(rng, num_tokens=3, hidden=64, num_experts=4, top_k=2, dtype="bfloat16")
with workspace.WorkspacePool(name="serving") as pool, pool.use(), jax_b12x.lane("draft"):
    step = jax.jit(lambda x, w, i, r: moe.fused_moe(x, w, i, r))
    hits.clear()
    out = step(tokens[0], weights, *tokens[1:])
    print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss")
    print([(record.program, record.lane, record.state) for record in pool.records()])
    print(np.asarray(out).view(np.uint16).sum())
"""


def test_a_program_from_the_persistent_cache_leases_its_workspace_in_its_lane(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    here = pathlib.Path(__file__).resolve().parent
    runs = [
        subprocess.run(
            [sys.executable, str(script), str(tmp_path / "cache"), str(here)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert [run[0] for run in runs] == ["miss", "hit"]
    assert runs[0][1:] == runs[1][1:]
    assert runs[1][1] == "[('jit__lambda', 'draft', 'leased')]"


def test_a_closed_pool_is_not_entered_again():
    with workspace.WorkspacePool() as pool:
        pass
    with pytest.raises(workspace.WorkspaceError, match=f"pool '{pool.name}' is closed"), pool:
        pass
