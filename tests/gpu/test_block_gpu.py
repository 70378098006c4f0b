"""Blocks on a GPU: every order gives the same bits, and a captured graph has the plan's edges."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import neighbours
import numpy as np
import pytest
from moe_inputs import random_tokens, random_weights

import jax_b12x
from jax_b12x import moe, workspace
from jax_b12x.moe import routing

pytestmark = pytest.mark.gpu

CAPTURED = {"xla_gpu_graph_min_graph_size": 1}
EAGER = {"xla_gpu_graph_min_graph_size": 1 << 30}
HIDDEN, INTERMEDIATE, SHARED, EXPERTS, TOP_K = 512, 256, 384, 32, 4
REPLAYS = 10_000


class Layer:
    """Weights of a layer, and a plan for each number of tokens."""

    def __init__(self, kind, recipe, seed):
        rng = self.rng = np.random.default_rng(seed)
        self.recipe = recipe
        self.router = moe.RouterParams(
            jnp.asarray(rng.normal(size=(EXPERTS, HIDDEN)) / 8, jnp.bfloat16)
        )
        experts = random_weights(
            rng, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, bias=True
        )
        self.experts = experts.prepare(self.routed_plan(1, "fused"))
        if kind == "dense":
            self.shared_plan = lambda routed: moe.DensePlan(SHARED)
            self.shared = moe.DenseExpert(
                jnp.asarray(rng.normal(size=(2 * SHARED, HIDDEN)) / 20, jnp.bfloat16),
                jnp.asarray(rng.normal(size=(HIDDEN, SHARED)) / 20, jnp.bfloat16),
            )
        else:
            self.shared_plan = self.packed_plan
            shared = random_weights(rng, hidden=HIDDEN, intermediate=SHARED, num_experts=1)
            self.shared = shared.prepare(self.packed_plan(self.routed_plan(1, "fused")))

    def routed_plan(self, num_tokens, implementation):
        return moe.plan(
            self.recipe,
            num_tokens=num_tokens,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            num_experts=EXPERTS,
            top_k=TOP_K,
            dtype=jnp.bfloat16,
            implementation=implementation,
        )

    def packed_plan(self, routed):
        return moe.plan(
            self.recipe,
            num_tokens=routed.num_tokens,
            hidden=HIDDEN,
            intermediate=SHARED,
            num_experts=1,
            top_k=1,
            dtype=jnp.bfloat16,
        )

    def plan(self, num_tokens, implementation, overlap="auto", *, router=True):
        routed = self.routed_plan(num_tokens, implementation)
        return moe.plan_block(
            routed, router=router, shared=self.shared_plan(routed), overlap=overlap
        )

    def block(self, x, plan):
        return moe.moe_block(x, self.experts, router=self.router, shared=self.shared, plan=plan)

    def alone(self, x):
        """The block's parts as ops of their own."""
        ids, weights, _ = routing.route(x, self.router.weight, top_k=TOP_K)
        routed = self.routed_plan(x.shape[0], "split")
        out = moe.fused_moe(x, self.experts, ids, weights, plan=routed)
        if isinstance(self.shared, moe.DenseExpert):
            shared = moe.dense_mlp(x, self.shared)
        else:
            ones = jnp.ones((x.shape[0], 1), jnp.float32)
            zeros = jnp.zeros_like(ones, jnp.int32)
            shared = moe.fused_moe(x, self.shared, zeros, ones, plan=self.packed_plan(routed))
        total = (out.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
        return total, ids, weights

    def tokens(self, num_tokens):
        return random_tokens(
            self.rng,
            num_tokens=num_tokens,
            hidden=HIDDEN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            dtype="bfloat16",
        )[0]


def layer_of(kind="dense", recipe="nvfp4", seed=0):
    return _layer(kind, recipe, seed)


_layer = functools.cache(Layer)


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


@pytest.mark.parametrize(
    ("kind", "recipe", "num_tokens"),
    [("packed", "w4a16", 1), ("dense", "nvfp4", 5), ("dense", "w4a16", 8), ("packed", "nvfp4", 8)],
)
def test_every_order_gives_the_bits_of_the_ops_alone_eagerly_and_replayed(kind, num_tokens, recipe):
    layer = layer_of(kind, recipe)
    plans = [
        layer.plan(num_tokens, implementation, overlap)
        for implementation in ("fused", "split")
        for overlap in ("auto", "off")
    ]
    orders = [plan.order for plan in plans]
    resident = "pre_resident" if num_tokens <= 7 else "serial"
    assert orders == [resident, "serial", "concurrent", "serial"]
    blocks = jax.jit(lambda x: [layer.block(x, plan) for plan in plans])
    x = layer.tokens(num_tokens)
    eager = blocks.lower(x).compile(compiler_options=EAGER)
    captured = blocks.lower(x).compile(compiler_options=CAPTURED)
    alone = jax.jit(layer.alone)
    for turn in range(100):
        x = layer.tokens(num_tokens)
        if turn % 10 == 9:
            x = x.at[0, 3].set(jnp.nan)
        expected = alone(x)
        runs = (eager, captured) if turn < 10 else (captured,)
        for result in [result for run in runs for result in run(x)]:
            for one, other in zip(result, expected, strict=True):
                np.testing.assert_array_equal(bits(one), bits(other))


def reachable(edges, start):
    """Returns the nodes that come after ``start``."""
    found, new = set(), {start}
    while new:
        new = {b for a, b in edges if a in new} - found
        found |= new
    return found


GRAPHS = [
    ("split", "concurrent", ["fork", "shared on aux", "router", "routed", "join", "add"]),
    ("fused", "pre_resident", ["fork", "shared on aux", "router", "join", "routed", "add"]),
]


@pytest.mark.parametrize(("implementation", "order", "steps"), GRAPHS)
def test_a_captured_graph_forks_and_joins_where_the_plan_says(implementation, order, steps):
    layer = layer_of()
    plan = layer.plan(4, implementation)
    assert plan.order == order
    x = layer.tokens(4)
    compiled = jax.jit(lambda x: layer.block(x, plan)).lower(x).compile(compiler_options=CAPTURED)
    with moe.record_launches() as launches:
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    assert launches
    assert all(launch["steps"] == steps for launch in launches)
    graphs = [launch for launch in launches if launch["nodes"]]
    assert graphs, "nothing was captured"
    nodes, edges = graphs[-1]["nodes"], graphs[-1]["edges"]

    def places(*names):
        found = [i for i, node in enumerate(nodes) if any(name in node for name in names)]
        assert found, (names, nodes)
        return found

    shared, router = places("dense_mlp"), places("router")
    routed, (add,) = places("sm90_moe_decode"), places("3add")
    after_shared = set().union(*(reachable(edges, node) for node in shared))
    after_router = set().union(*(reachable(edges, node) for node in router))
    after_routed = set().union(*(reachable(edges, node) for node in routed))
    assert add in after_shared & after_routed
    assert set(routed) <= after_router
    # What is on one branch never waits for what is on the other.
    assert not after_shared & set(router)
    assert not after_router & set(shared)
    if order == "concurrent":
        assert not after_shared & set(routed)
        assert not after_routed & set(shared)
    else:
        assert set(routed) <= after_shared


def replay_and_count(step, x, expected, replays=REPLAYS):
    """Replays a captured program; returns how many elements ever differed from ``expected``."""

    def counting(count, x, expected):
        results = jax.tree.leaves(step(x))
        for result, right in zip(results, jax.tree.leaves(expected), strict=True):
            kind = jnp.uint16 if result.dtype.itemsize == 2 else jnp.uint32
            differ = jax.lax.bitcast_convert_type(result, kind) != (
                jax.lax.bitcast_convert_type(right, kind)
            )
            count += differ.sum(dtype=jnp.int32)
        return count

    count = jnp.int32(0)
    compiled = (
        jax.jit(counting, donate_argnums=0)
        .lower(count, x, expected)
        .compile(compiler_options=CAPTURED)
    )
    for turn in range(replays):
        count = compiled(count, x, expected)
        if turn % 500 == 499:
            count.block_until_ready()
    return int(count)


def test_resident_grids_beside_products_of_another_stream_give_the_same_bits():
    inputs = [layer_of().tokens(n) for n in range(1, 8)]
    layers = [layer_of(recipe=recipe) for recipe in ("nvfp4", "w4a16")]

    def step(inputs):
        results = []
        for layer in layers:
            for x in inputs:
                ids, weights, _ = routing.route(x, layer.router.weight, top_k=TOP_K)
                plan = layer.routed_plan(x.shape[0], "fused")
                results.append(moe.fused_moe(x, layer.experts, ids, weights, plan=plan))
        return results

    expected = jax.jit(step)(inputs)
    with neighbours.products() as submitted:
        before = submitted()
        assert replay_and_count(step, inputs, expected) == 0
        assert submitted() > before + 1000
    workspace.default().check()


def test_concurrent_blocks_beside_products_of_another_stream_give_the_same_bits():
    inputs = [layer_of().tokens(n) for n in range(1, 8)]
    calls = [(layer, x) for layer in (layer_of("dense"), layer_of("packed")) for x in inputs]
    plans = [layer.plan(x.shape[0], "split") for layer, x in calls]
    assert {plan.order for plan in plans} == {"concurrent"}

    def step(inputs):
        return [
            tuple(layer.block(inputs[x.shape[0] - 1], plan))
            for (layer, x), plan in zip(calls, plans, strict=True)
        ]

    expected = jax.jit(lambda inputs: [layer.alone(inputs[x.shape[0] - 1]) for layer, x in calls])(
        inputs
    )
    with neighbours.products() as submitted:
        before = submitted()
        assert replay_and_count(step, inputs, expected) == 0
        assert submitted() > before + 1000


def test_target_and_draft_replayed_from_two_threads_give_the_same_bits():
    outcome = {}

    def run(lane, implementation, num_tokens, seed):
        with jax_b12x.lane(lane), pool.use():
            layer = layer_of(seed=seed)
            x = layer.tokens(num_tokens)
            plan = layer.plan(num_tokens, implementation)
            expected = jax.jit(layer.alone)(x)
            outcome[lane] = replay_and_count(
                lambda x: tuple(layer.block(x, plan)), x, expected, replays=3000
            )

    with workspace.WorkspacePool(lanes=("target", "draft"), isolation="lane") as pool:
        threads = [
            threading.Thread(target=run, args=("target", "fused", 5, 1)),
            threading.Thread(target=run, args=("draft", "split", 1, 2)),
            threading.Thread(target=run, args=("target", "split", 7, 3)),
            threading.Thread(target=run, args=("draft", "fused", 2, 4)),
        ]
        # Two at a time: what a target and a draft do.
        for pair in (threads[:2], threads[2:]):
            outcome.clear()
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join()
            assert outcome == {"target": 0, "draft": 0}
        pool.check()
        assert {record.lane for record in pool.records()} == {"target", "draft"}


def test_two_threads_may_run_one_program_while_it_is_captured():
    layer = layer_of()
    x = layer.tokens(3)
    plan = layer.plan(3, "fused")
    assert plan.order == "pre_resident"
    expected = jax.jit(layer.alone)(x)
    outcome = []

    def run(compiled, barrier):
        barrier.wait()
        for _ in range(100):
            for one, other in zip(compiled(x), expected, strict=True):
                np.testing.assert_array_equal(bits(one), bits(other))
        outcome.append("equal")

    for _ in range(3):
        lowered = jax.jit(lambda x: layer.block(x, plan)).lower(x)
        compiled = lowered.compile(compiler_options=CAPTURED)
        barrier = threading.Barrier(2)
        threads = [threading.Thread(target=run, args=(compiled, barrier)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outcome == ["equal"] * 6


@pytest.fixture(scope="module")
def holder():
    return neighbours.Holder()


def step_that_is_not_resident(layer, x):
    """A fused MoE launched without the driver's promise that all of its blocks are there."""
    ids, weights, _ = routing.route(x, layer.router.weight, top_k=TOP_K)
    plan = layer.routed_plan(x.shape[0], "fused")
    plan = dataclasses.replace(plan, geometry=(*plan.geometry, ("unchecked_residency", 1)))
    return moe.fused_moe(x, layer.experts, ids, weights, plan=plan)


@pytest.mark.parametrize("options", [EAGER, CAPTURED], ids=["eager", "captured"])
def test_a_grid_that_is_not_resident_fails_within_its_bound_and_the_gpu_goes_on(holder, options):
    layer = layer_of()
    x = layer.tokens(3)
    expected = np.asarray(
        jax.jit(lambda x: moe.fused_moe(
            x, layer.experts, *routing.route(x, layer.router.weight, top_k=TOP_K)[:2],
            plan=layer.routed_plan(3, "split")))(x)
    )  # fmt: skip
    with workspace.WorkspacePool(timeout=0.1) as pool, pool.use():
        step = jax.jit(lambda x: step_that_is_not_resident(layer, x))
        compiled = step.lower(x).compile(compiler_options=options)
        for _ in range(3):  # with the GPU to itself it is resident; the last ones are replays
            np.testing.assert_array_equal(bits(compiled(x)), bits(expected))

        holder.hold(multiprocessors=64, seconds=1)
        out = np.asarray(compiled(x), np.float32)
        assert holder.is_held(), "the run waited for the multiprocessors to be free"
        assert np.isnan(out).all()
        with pytest.raises(
            workspace.WorkspaceError, match=r"of jit_.*\(moe\), device 0: .*100 ms.*NaN"
        ):
            pool.check()
        holder.wait()
        np.testing.assert_array_equal(bits(compiled(x)), bits(expected))

        # Without a look at the pool, the program's next run says it.
        holder.hold(multiprocessors=64, seconds=1)
        assert np.isnan(np.asarray(compiled(x), np.float32)).all()
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="timeout of 100 ms"):
            jax.block_until_ready(compiled(x))
        holder.wait()
        np.testing.assert_array_equal(bits(compiled(x)), bits(expected))
        pool.check()
        (record,) = pool.records()
        assert record.faults == 2


def test_a_cooperative_launch_waits_for_the_multiprocessors_instead(holder):
    layer = layer_of()
    x = layer.tokens(3)
    ids, weights, _ = routing.route(x, layer.router.weight, top_k=TOP_K)
    expected = moe.fused_moe(x, layer.experts, ids, weights, plan=layer.routed_plan(3, "split"))
    fused = layer.routed_plan(3, "fused")
    with workspace.WorkspacePool(timeout=0.1) as pool, pool.use():
        step = jax.jit(lambda x: moe.fused_moe(x, layer.experts, ids, weights, plan=fused))
        step(x).block_until_ready()
        holder.hold(multiprocessors=64, seconds=0.5)
        out = pool.block_until_ready(step(x))
        np.testing.assert_array_equal(bits(out), bits(expected))
