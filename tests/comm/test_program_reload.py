"""Programs that were compiled or lowered elsewhere: they know their pool by name."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from comm_testing import (
    KINDS,
    PLATFORMS,
    P,
    assert_same_bits,
    every_kind,
    mesh_of,
    random_parts,
)

import jax_b12x

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
sys.path.insert(0, sys.argv[2])
from comm_testing import KINDS

mesh = Mesh(np.array(jax.devices(sys.argv[3])[:2]), ("tp",))
for kind, isolation in ((k, i) for k in KINDS for i in ("call_site", "executable", "lane")):
    pool = kind.pool(mesh, "tp", name=f"{kind.name}_{isolation}", isolation=isolation)

    def body(x):
        with pool.ordered():
            return kind.call(kind.call(x, pool), pool)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False)
    step = jax.jit(mapped)
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    hits.clear()
    out = np.asarray(step(x))
    expected = kind.expected(kind.expected(x, 2), 2)[:1]
    assert (out == expected).all(), (out, expected)
    print("hit" if "/jax/compilation_cache/cache_hits" in hits else "miss")
    assert pool.records()
    pool.close()
"""


@pytest.mark.parametrize("platform", PLATFORMS)
def test_programs_from_the_persistent_cache_work_in_a_new_process(platform, tmp_path):
    mesh_of(2, platform)  # skips where there are fewer devices
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    outcomes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script, tmp_path / "cache", os.path.dirname(__file__), platform],
            capture_output=True,
            text=True,
            timeout=250,
            env=os.environ,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outcomes.append(done.stdout.split())
    programs = 3 * len(KINDS)
    assert outcomes == [["miss"] * programs, ["hit"] * programs]


def exported(kind, pool, parts):
    step = jax.jit(
        jax.shard_map(
            lambda x: kind.call(x, pool),
            mesh=pool.topology.mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
            check_vma=False,
        )
    )
    disabled = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in ("b12x_all_reduce", "b12x_dcp_combine", "b12x_dcp_gather")
    ]
    return jax.export.export(step, disabled_checks=disabled)(
        jax.ShapeDtypeStruct(parts.shape, parts.dtype, sharding=parts.sharding)
    ).serialize()


@every_kind
def test_an_exported_program_runs_on_a_pool_of_the_same_name(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="travels") as pool:
        program = exported(kind, pool, parts)
    jax_b12x.register()
    with kind.pool(mesh, "tp", name="travels"):
        out = jax.jit(jax.export.deserialize(program).call)(parts)
        assert_same_bits(out, kind.expected(parts, 2))


@every_kind
def test_a_program_whose_pool_is_not_open_says_how_to_open_it(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="gone") as pool:
        program = exported(kind, pool, parts)
    with pytest.raises(
        Exception, match=r"'gone', which is not open.*ChannelPool\(mesh, axis, name"
    ):
        jax.block_until_ready(jax.jit(jax.export.deserialize(program).call)(parts))
