"""The teardown protocol: a fault at every single step, on every rank, and real processes."""

import subprocess
import sys
import textwrap
import threading
import time

import jax.numpy as jnp
import pytest
from comm_testing import every_kind, free_port, mesh_of, on_each

from jax_b12x import comm
from jax_b12x.comm.teardown import LocalGroup, teardown

RANKS = 3
CHANNELS = 2
ACTIONS = ("quiesce", "close_imports", "free_exports")
BARRIERS = ("ready", "unmapped", "freed")


class Ward:
    """A channel of one rank that remembers what was done to it, and fails where it is told to."""

    def __init__(self, name, log, fault=None):
        self.name = name
        self._log = log
        self._fault = fault

    def __getattr__(self, action):
        if action not in ACTIONS:
            raise AttributeError(action)

        def act():
            self._log.append((action, self.name))
            if action == self._fault:
                raise OSError(f"planted in {action} of {self.name}")

        return act


class Threads:
    """Ranks as threads, with barriers that time out."""

    def __init__(self, size, timeouts=(5.0, 5.0, 5.0)):
        self._barriers = {
            name: threading.Barrier(size, timeout=timeout)
            for name, timeout in zip(BARRIERS, timeouts, strict=True)
        }
        self._notes = {name: [] for name in BARRIERS}

    def of_rank(self, log, fault=None):
        outer = self

        class Group:
            def barrier(self, name, note):
                log.append(("barrier", name))
                if name == fault:
                    raise ConnectionError(f"planted at {name}")
                if note:
                    outer._notes[name].append(note)
                outer._barriers[name].wait()
                return list(outer._notes[name])

        return Group()


def run_ranks(fault_of=lambda rank: None, barrier_fault_of=lambda rank: None, **of_rank):
    lost = any(map(barrier_fault_of, range(RANKS)))
    # The rank that was lost at one barrier waits for the others at the next.
    threads = Threads(RANKS, (0.2, 0.8, 2.0) if lost else (5.0, 5.0, 5.0))
    logs, errors = [[] for _ in range(RANKS)], [None] * RANKS

    def run(rank):
        fault = fault_of(rank)
        wards = [
            Ward(str(number), logs[rank], fault[1] if fault and fault[0] == number else None)
            for number in range(CHANNELS)
        ]
        try:
            arguments = {name: values[rank] for name, values in of_rank.items()}
            teardown(
                "test", wards, threads.of_rank(logs[rank], barrier_fault_of(rank)), **arguments
            )
        except BaseException as error:
            errors[rank] = error

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(timeout=20)
        assert not each.is_alive(), "a rank waits for ever"
    return logs, errors


def whole_protocol():
    steps = [("barrier", "ready")]
    for action, barrier in zip(ACTIONS, (None, "unmapped", "freed"), strict=True):
        steps += [(action, str(number)) for number in range(CHANNELS)]
        if barrier:
            steps.append(("barrier", barrier))
    return steps


def test_without_faults_every_rank_goes_through_the_three_barriers():
    logs, errors = run_ranks()
    assert logs == [whole_protocol()] * RANKS
    assert errors == [None] * RANKS


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("number", range(CHANNELS))
@pytest.mark.parametrize("culprit", range(RANKS))
def test_a_fault_at_any_step_leaves_all_attempted_and_all_past_the_last_barrier(
    action, number, culprit
):
    logs, errors = run_ranks(lambda rank: (number, action) if rank == culprit else None)
    assert logs == [whole_protocol()] * RANKS
    for error in errors:
        assert isinstance(error, comm.TeardownError)
        assert f"planted in {action} of {number}" in str(error.exceptions[0])


def test_faults_of_several_ranks_are_all_reported():
    _, errors = run_ranks(lambda rank: (0, ACTIONS[rank]))
    for error in errors:
        text = " ".join(map(str, error.exceptions))
        for action in ACTIONS:
            assert f"planted in {action} of 0" in text


@pytest.mark.parametrize("culprit", range(RANKS))
@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_rank_lost_at_a_barrier_leaves_nobody_waiting_and_pulls_no_memory_away(barrier, culprit):
    logs, errors = run_ranks(barrier_fault_of=lambda rank: barrier if rank == culprit else None)
    for log, error in zip(logs, errors, strict=True):
        assert isinstance(error, comm.TeardownError)
        assert [step for step in log if step[0] == "barrier"] == [("barrier", b) for b in BARRIERS]
        assert [step for step in log if step[0] == "close_imports"]
        freed = [step for step in log if step[0] == "free_exports"]
        # Whether peers still have mappings is unknown: keep the memory.
        assert len(freed) == (0 if barrier == "unmapped" else CHANNELS)


@pytest.mark.parametrize("culprit", range(RANKS))
def test_a_refusal_on_one_rank_changes_nothing_on_any(culprit):
    committed = []
    logs, errors = run_ranks(
        refusal=[lambda rank=rank: "in use" if rank == culprit else "" for rank in range(RANKS)],
        commit=[lambda rank=rank: committed.append(rank) for rank in range(RANKS)],
    )
    assert logs == [[("barrier", "ready")]] * RANKS
    assert not committed
    for error in errors:
        assert isinstance(error, comm.TeardownRefusedError)
        assert "in use" in str(error)


def test_the_state_is_recorded_before_anything_is_closed_and_a_fault_there_stops_nothing():
    log = []

    def commit():
        log.append("commit")
        raise OSError("planted in commit")

    with pytest.raises(comm.TeardownError, match="taken down, with failures"):
        teardown("test", [Ward("0", log)], LocalGroup(), commit=commit)
    assert log == ["commit", *((action, "0") for action in ACTIONS)]


@every_kind
@pytest.mark.parametrize("action", ACTIONS)
def test_a_pool_whose_close_fails_half_way_is_closed(kind, action, monkeypatch):
    pool = kind.pool(mesh_of(2), "tp", name="half_way")
    on_each(pool.topology.mesh, lambda x: kind.call(kind.call(x, pool), pool))(jnp.ones((2, 8)))
    native, attempted = pool._native, []

    class Faulty:
        def __getattr__(self, name):
            def call(*args, **kwargs):
                if name in ACTIONS:
                    attempted.append((name, *args))
                    if (name, *args) == (action, 0, 1):
                        raise OSError("planted")
                return getattr(native, name)(*args, **kwargs)

            return call

    monkeypatch.setattr(pool, "_native", Faulty())
    with pytest.raises(comm.TeardownError) as caught:
        pool.close()
    assert "planted" in str(caught.value.exceptions[0])
    assert attempted == [
        (name, channel, rank) for name in ACTIONS for channel in (0, 1) for rank in (0, 1)
    ]
    assert pool.closed
    pool.close()
    assert not native.records()
    kind.pool(mesh_of(2), "tp", name="half_way").close()


# Each rank offers a block of shared memory and maps its peer's. What they do is real: the mappings,
# the barriers of jax.distributed, the exit of a process half way.
PROCESS = """
import sys
from multiprocessing import shared_memory
import jax

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax_b12x.comm.coordination import CoordinatedGroup, coordination
from jax_b12x.comm.teardown import TeardownError, teardown

client, _ = coordination()


class Block:
    def __init__(self, case, number):
        self.name = f"block {number}"
        self.fault = case if case[0] == rank and number == 0 else None
        self.export = shared_memory.SharedMemory(create=True, size=4096)
        client.key_value_set(f"{case}/{number}/{rank}", self.export.name)
        peer = client.blocking_key_value_get(f"{case}/{number}/{1 - rank}", 20000)
        self.peer = shared_memory.SharedMemory(peer, track=False) if TRACK else \\
            shared_memory.SharedMemory(peer)
        self.peer.buf[rank] = 1
        self.done = []

    def step(self, name, act):
        self.done.append(name)
        act()
        if self.fault is not None and self.fault[1] == name:
            raise OSError("planted")

    def quiesce(self):
        self.step("quiesce", lambda: None)

    def close_imports(self):
        self.step("close_imports", self.peer.close)

    def free_exports(self):
        self.step("free_exports", lambda: (self.export.close(), self.export.unlink()))


TRACK = sys.version_info >= (3, 13)
actions = ["quiesce", "close_imports", "free_exports"]
for case in [(0, "none"), *((culprit, action) for culprit in (0, 1) for action in actions)]:
    blocks = [Block(case, number) for number in range(2)]
    error = None
    try:
        teardown("blocks", blocks, CoordinatedGroup(f"test/{case}", (0, 1), timeout=20))
    except TeardownError as caught:
        error = caught
    for block in blocks:
        assert block.done == actions, (case, block.done)
    assert (error is not None) == (case[1] != "none"), (case, error)
    if error is not None:
        assert any("planted" in str(each) for each in error.exceptions), error.exceptions
print("past the last barrier", flush=True)
"""


def test_two_processes_take_shared_memory_down_together_whatever_fails_on_either(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(PROCESS))
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + 200
    for process in ranks:
        output, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
        assert process.returncode == 0, output
        assert "past the last barrier" in output, output
