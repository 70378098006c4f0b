"""Programs that were compiled or lowered elsewhere: they know their pool by name."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_testing import (
    KINDS,
    PLATFORMS,
    P,
    assert_same_bits,
    every_kind,
    mesh_of,
    on_each,
    random_parts,
)
from jax.sharding import Mesh, NamedSharding

import jax_b12x
from jax_b12x import comm
from jax_b12x.comm.topology import Place, Topology

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
    def body(x):
        with pool.ordered():
            return kind.call(x, pool)

    spec = parts.sharding.spec
    step = jax.jit(
        jax.shard_map(body, mesh=pool.topology.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    disabled = [jax.export.DisabledSafetyCheck.custom_call(target) for target in comm.TARGETS]
    on_gpus = pool.topology.mesh.devices.flat[0].platform == "gpu"
    platforms = ["cuda" if on_gpus else "cpu"]
    return jax.export.export(step, platforms=platforms, disabled_checks=disabled)(
        jax.ShapeDtypeStruct(parts.shape, parts.dtype, sharding=parts.sharding)
    ).serialize()


def test_the_targets_are_those_that_programs_call():
    mesh = mesh_of(2)
    with (
        comm.ChannelPool(mesh, "tp", isolation="executable") as sums,
        comm.DcpPool(mesh, "tp") as dcp,
    ):

        def body(x):
            with sums.ordered():
                x = comm.all_reduce(x, sums)
                x, _ = comm.all_reduce_rms_norm(x, x, x[0, 0], 1e-5, sums)
            x = comm.dcp_gather_heads(x, dcp)
            return comm.dcp_combine(x, x[..., 0], dcp)

        text = on_each(mesh, body).lower(jnp.ones((2, 4, 2, 8))).as_text()
    assert set(re.findall(r"@(b12x_\w+)", text)) == set(comm.TARGETS)


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


def grid(devices, *names, platform="cpu"):
    return Mesh(np.array(jax.devices(platform))[np.array(devices)], names)


OTHER_POOLS = {
    "another axis": (([[0, 1], [2, 3]], "dp", "tp"), "dp", r"2 ranks .*\[0 2 \| 1 3 #"),
    "both axes": (([[0, 1], [2, 3]], "dp", "tp"), ("dp", "tp"), r"4 ranks .*\[0 1 2 3 #"),
    "more ranks": (([0, 1, 2, 3], "tp"), "tp", r"4 ranks .*\[0 1 2 3 #"),
    "ranks swapped": (([[1, 0], [2, 3]], "dp", "tp"), "tp", r"2 ranks .*\[1 0 \| 2 3 #"),
    "groups swapped": (([[2, 3], [0, 1]], "dp", "tp"), "tp", r"2 ranks .*\[2 3 \| 0 1 #"),
    # The same groups, but the program's parts are elsewhere.
    "mesh transposed": (([[0, 2], [1, 3]], "tp", "dp"), "tp", r"2 ranks .*\[0 1 \| 2 3 #"),
}


@every_kind
@pytest.mark.parametrize("isolation", ["call_site", "executable"])
@pytest.mark.parametrize("other", OTHER_POOLS)
def test_a_pool_of_the_same_name_with_another_layout_refuses_the_program(kind, isolation, other):
    mesh = grid([[0, 1], [2, 3]], "dp", "tp")
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="moved", isolation=isolation) as pool:
        program = exported(kind, pool, parts)
    places, axis, has = OTHER_POOLS[other]
    other_mesh = grid(*places)
    said = (
        r"was traced for a pool 'moved' with 2 ranks a group in the layout \[0 1 \| 2 3 #\w+\], "
        rf"but the pool of that name that is open has {has}\w+\]: open the pool over the same axis"
    )
    with kind.pool(other_mesh, axis, name="moved", isolation=isolation) as pool:
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            jax.block_until_ready(jax.jit(jax.export.deserialize(program).call)(parts))
        assert not pool.records()
    with kind.pool(mesh, "tp", name="moved", isolation=isolation):
        out = jax.jit(jax.export.deserialize(program).call)(parts)
        assert_same_bits(out, kind.expected(parts, 2))


@every_kind
@pytest.mark.multigpu
def test_on_gpus_a_pool_of_the_same_name_with_its_ranks_swapped_refuses_the_program(kind):
    mesh = mesh_of(2, "gpu")
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="moved") as pool:
        program = exported(kind, pool, parts)
    swapped = grid([1, 0], "tp", platform="gpu")
    said = r"2 ranks a group in the layout \[0 1 #\w+\], .* has 2 ranks a group .*\[1 0 #\w+\]"
    with kind.pool(swapped, "tp", name="moved") as pool:
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            jax.block_until_ready(jax.jit(jax.export.deserialize(program).call)(parts))
        assert not pool.records()
    with kind.pool(mesh, "tp", name="moved"):
        out = jax.jit(jax.export.deserialize(program).call)(parts)
        assert_same_bits(out, kind.expected(parts, 2))


@every_kind
def test_an_exported_program_runs_on_other_devices_in_the_same_places(kind):
    mesh, elsewhere = grid([0, 1], "tp"), grid([2, 3], "x")
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="replica") as pool:
        program = exported(kind, pool, parts)
    with kind.pool(elsewhere, "x", name="replica"):
        moved = jax.device_put(parts, NamedSharding(elsewhere, P("x")))
        out = jax.jit(jax.export.deserialize(program).call)(moved)
        assert_same_bits(out, kind.expected(parts, 2))


@every_kind
def test_a_lane_pool_refuses_a_program_whose_calls_have_no_order(kind):
    mesh = mesh_of(2)
    parts = random_parts(0, mesh, (64,), jnp.float32)
    with kind.pool(mesh, "tp", name="shared") as pool:
        program = exported(kind, pool, parts)
    with (
        kind.pool(mesh, "tp", name="shared", isolation="lane") as pool,
        pytest.raises(jax.errors.JaxRuntimeError, match=r"traced without pool.ordered\(\)"),
    ):
        jax.block_until_ready(jax.jit(jax.export.deserialize(program).call)(parts))


def test_a_layout_that_is_cut_for_people_is_whole_in_its_digest():
    def layout(ids):
        places = [Place(SimpleNamespace(id=n), at // 2, at % 2) for at, n in enumerate(ids)]
        return Topology(None, ("tp",), 2, tuple(places)).layout

    ids = list(range(256))
    swapped = [*ids[:-2], 255, 254]
    assert layout(ids) == layout([1000 + n for n in ids])
    assert layout(ids).startswith("0 1 | 2 3 | ")
    assert layout(ids).split("#")[0] == layout(swapped).split("#")[0]
    assert layout(ids) != layout(swapped)
    assert len(layout(ids)) < 80


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
