"""Ranks in processes of their own: the exchange of addresses, and on GPUs the whole of it."""

import os
import subprocess
import sys
import time

import pytest
from comm_testing import every_kind, free_port


def run_ranks(tmp_path, program, *arguments, timeout=120):
    """Runs ``program`` as two processes; both must end well."""
    script = tmp_path / "rank.py"
    script.write_text(program)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # One device each. Processes that compile together share XLA's autotuning, and would
            # wait for each other's program where they compile in different orders.
            env={**os.environ, "XLA_FLAGS": "--xla_gpu_shard_autotuning=false"},
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + timeout
    outputs = []
    try:
        for process in ranks:
            outputs.append(process.communicate(timeout=max(1, deadline - time.monotonic()))[0])
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, output) for process, output in zip(ranks, outputs, strict=True)]


# The memory is only pretended here, everything else is real: two processes, jax.distributed, and
# the names under which they find each other.
EXCHANGE = """
import sys
import jax
rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import numpy as np
from jax.sharding import Mesh
from jax_b12x.comm import coordination
from jax_b12x.comm.topology import Topology
from jax_b12x.comm.transport_ipc import IpcError, IpcExchange


class Memory:
    closed = []

    def export(self, ordinal, address):
        return address.to_bytes(8, "big") * 8

    def open(self, ordinal, data):
        return int.from_bytes(data[:8], "big") + 1

    def close(self, ordinal, address):
        self.closed.append(address)
        if address == 2001 + 1000 * (1 - rank):
            raise OSError("planted")


topology = Topology.of(Mesh(np.array(jax.devices()), ("tp",)), "tp")
ordinal = next(place.ordinal for place in topology.places if place.local)
exchange = IpcExchange("pool", topology, 2.0, by_lane=False, cuda=Memory())

# Each program at its own address; the ranks make them in opposite orders, and one of them twice.
programs = [("target", 1), ("draft", 2), ("target", 3)]
if rank == 1:
    programs = [("draft", 2), ("target", 1), ("target", 3)]
for channel, (program, number) in enumerate(programs):
    slabs = [(ordinal, 1000 * rank + number)]
    exchange.publish(channel, "all_reduce", f"jit_{program}", 1, "default", 64, slabs)
peer = 1 - rank
for channel, (program, number) in reversed(list(enumerate(programs))):
    assert exchange.connect(channel) == [(ordinal, peer, 1000 * peer + number + 1)], program

# A program that only one rank makes.
exchange.publish(9, "all_reduce", f"jit_only_on_{rank}", 1, "default", 64, [(ordinal, 7)])
try:
    exchange.connect(9)
except IpcError as error:
    assert f"rank {peer} did not offer its memory within the timeout of 2 s" in str(error), error
else:
    raise AssertionError("found memory that nobody offered")

for channel in range(3):
    exchange.close(channel, rank)
    exchange.close(channel, rank)
assert len(Memory.closed) == 3

# Both processes are on this host, until one says that it is elsewhere.
assert len(coordination.hosts_of((0, 1))) == 1
coordination.coordination()[0].wait_at_barrier("asked", 60_000)
if rank == 1:
    coordination._host = lambda: "elsewhere"
    coordination.hosts_of(())
coordination.coordination()[0].wait_at_barrier("told", 60_000)
assert len(coordination.hosts_of((0, 1))) == 2
print("exchanged")
"""


def test_ranks_find_each_others_channels_whatever_order_they_make_programs_in(tmp_path):
    for code, output in run_ranks(tmp_path, EXCHANGE, timeout=200):
        assert code == 0, output
        assert "exchanged" in output, output


GPUS = """
import faulthandler, os, sys, time
faulthandler.dump_traceback_later(55, exit=True)
import jax, jax.numpy as jnp, numpy as np
rank, port, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, rank, local_device_ids=[rank])
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_b12x import comm
from jax_b12x.comm import coordination
sys.path.insert(0, sys.argv[5])
from comm_testing import KINDS
kind = next(each for each in KINDS if each.name == sys.argv[4])

mesh = Mesh(np.array(jax.devices()), ("tp",))
sharding = NamedSharding(mesh, P("tp"))
isolation = case if case in ("executable", "lane") else "call_site"
pool = kind.pool(mesh, "tp", isolation=isolation, timeout=3)
assert pool.transport == "ipc", pool


def make(name, size):
    whole = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)

    def body(x):
        with pool.ordered():
            for _ in range(6):
                x = kind.call(x, pool) * np.float32(0.5)
        return x

    body.__name__ = name
    spec = P("tp")
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.make_array_from_process_local_data(sharding, whole[rank : rank + 1], whole.shape)
    expected = whole
    for _ in range(6):
        expected = kind.expected(expected, 2) * np.float32(0.5)
    return step.lower(x).compile(), x, expected[rank]


sizes = {"target": 3000, "draft": 77}
order = ["target", "draft"] if rank == 0 else ["draft", "target"]
programs = {name: make(name, sizes[name]) for name in order}

if case == "killed":
    step, x, expected = programs["target"]
    got = np.asarray(step(x).addressable_shards[0].data)[0]
    assert (got == expected).all()
    time.sleep(0.5)
    if rank == 1:
        os._exit(0)  # never arrives again
    time.sleep(1)
    begun = time.monotonic()
    out = step(x)
    try:
        pool.block_until_ready(out)
    except comm.ChannelError as error:
        assert "rank 1 did not arrive within the timeout of 3000 ms" in str(error), error
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begun < 3 + 1, time.monotonic() - begun
    assert np.isnan(np.asarray(out.addressable_shards[0].data)).all()
    assert float(jnp.sum(jnp.ones(1000))) == 1000  # the GPU is idle again
    coordination.BARRIER_TIMEOUT_S = 2
    try:
        pool.close()
    except comm.TeardownError as error:
        print("closed with", [str(each)[:80] for each in error.exceptions])
    assert pool.closed
    print("done", flush=True)
    os._exit(0)

rng = np.random.default_rng(7)  # the same order of runs on both ranks
for _ in range(500):
    step, x, expected = programs[str(rng.choice(["target", "draft"]))]
    got = np.asarray(step(x).addressable_shards[0].data)[0]
    assert (got == expected).all()
checkpoint = pool.checkpoint()
before = len(pool.records())
profiling, x, expected = make("profiling", 500)
assert (np.asarray(profiling(x).addressable_shards[0].data)[0] == expected).all()
if isolation != "lane":
    assert len(pool.records()) > before
try:
    pool.rollback(checkpoint)
except comm.RollbackRefusedError:
    pass
else:
    assert isolation == "lane", "rolled back under a living executable"
del profiling
jax.clear_caches()  # JAX's own hold on it
if isolation != "lane":
    pool.rollback(checkpoint)
    assert len(pool.records()) == before
step, x, expected = programs["target"]
assert (np.asarray(step(x).addressable_shards[0].data)[0] == expected).all()
pool.close()
print("done", flush=True)
"""


@every_kind
@pytest.mark.multigpu
@pytest.mark.parametrize("case", ["call_site", "executable", "lane", "killed"])
def test_two_processes_with_a_gpu_each(case, kind, tmp_path):
    """They compile target and draft in opposite orders, and run them in one."""
    here = os.path.dirname(__file__)
    outcomes = run_ranks(tmp_path, GPUS, case, kind.name, here, timeout=60)
    for code, output in outcomes:
        assert code == 0, output
    for _, output in outcomes[: 1 if case == "killed" else 2]:
        assert "done" in output, output
