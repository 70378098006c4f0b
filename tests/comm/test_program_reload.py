"""Programs that were compiled or lowered elsewhere: they know their pool by name."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from comm_testing import P, assert_same_bits, mesh_of, random_parts, rank_order_sum

import jax_b12x
from jax_b12x import comm

PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["NPROC"] = "64"
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
from jax.sharding import Mesh, PartitionSpec as P
from jax_b12x import comm

mesh = Mesh(np.array(jax.devices()), ("tp",))
for isolation in ("call_site", "executable", "lane"):
    pool = comm.ChannelPool(mesh, "tp", name=f"reloaded_{isolation}", isolation=isolation)

    def body(x):
        with pool.ordered():
            return comm.all_reduce(comm.all_reduce(x, pool), pool)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    step = jax.jit(mapped)
    x = jax.device_put(np.arange(16, dtype=np.float32))
    hits.clear()
    out = np.asarray(step(x))
    assert (out == 2 * (np.arange(8.0) + np.arange(8.0, 16.0))).all(), out
    print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss")
    assert pool.records()
    pool.close()
"""


def test_programs_from_the_persistent_cache_work_in_a_new_process(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    outcomes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            timeout=250,
            env=os.environ,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outcomes.append(done.stdout.split())
    assert outcomes == [["miss"] * 3, ["hit"] * 3]


def exported(pool, parts):
    step = jax.jit(
        jax.shard_map(
            lambda x: comm.all_reduce(x, pool),
            mesh=pool.topology.mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
            check_vma=False,
        )
    )
    disabled = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in ("b12x_all_reduce", "b12x_open_order")
    ]
    return jax.export.export(step, disabled_checks=disabled)(
        jax.ShapeDtypeStruct(parts.shape, parts.dtype, sharding=parts.sharding)
    ).serialize()


def test_an_exported_program_runs_on_a_pool_of_the_same_name():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with comm.ChannelPool(mesh, "tp", name="travels") as pool:
        program = exported(pool, parts)
    jax_b12x.register()
    with comm.ChannelPool(mesh, "tp", name="travels"):
        out = jax.jit(jax.export.deserialize(program).call)(parts)
        assert_same_bits(out, rank_order_sum(parts, 2))


def test_a_program_whose_pool_is_not_open_says_how_to_open_it():
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with comm.ChannelPool(mesh, "tp", name="gone") as pool:
        program = exported(pool, parts)
    with pytest.raises(
        Exception, match=r"'gone', which is not open.*ChannelPool\(mesh, axis, name"
    ):
        jax.block_until_ready(jax.jit(jax.export.deserialize(program).call)(parts))
