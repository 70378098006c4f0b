"""Blocks: the order of submission, and that no order changes a bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from moe_inputs import random_tokens, random_weights

from jax_b12x import capability, moe, workspace
from jax_b12x.moe import routing

HIDDEN, INTERMEDIATE, SHARED, EXPERTS, TOP_K = 64, 32, 48, 6, 3

H200 = capability.DeviceCapability(
    platform="cuda",
    sm=90,
    sm_count=132,
    cooperative_launch=True,
    shared_memory_bytes=227 << 10,
    l2_bytes=60 << 20,
    name="NVIDIA H200",
)


def routed_plan(
    num_tokens=5, *, recipe="w4a16", implementation=None, device=None, dtype="bfloat16"
):
    return moe.plan(
        recipe,
        num_tokens=num_tokens,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dtype=dtype,
        implementation=implementation,
        device=device,
    )


def shared_plan(kind, routed):
    if kind == "none":
        return None
    if kind == "dense":
        return moe.DensePlan(SHARED)
    return moe.plan(
        routed.recipe,
        num_tokens=routed.num_tokens,
        hidden=HIDDEN,
        intermediate=SHARED,
        num_experts=1,
        top_k=1,
        dtype=routed.dtype,
        device=routed.device,
    )


def make_plan(kind, *, router=True, overlap="auto", **facts):
    routed = routed_plan(**facts)
    return moe.plan_block(routed, router=router, shared=shared_plan(kind, routed), overlap=overlap)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def make_inputs(rng, kind, *, num_tokens=5, dtype="bfloat16"):
    weights = random_weights(
        rng, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, bias=True
    )
    x, ids, routes = random_tokens(
        rng, num_tokens=num_tokens, hidden=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, dtype=dtype
    )
    router = moe.RouterParams(jnp.asarray(rng.normal(size=(EXPERTS, HIDDEN)), jnp.float32))
    shared = None
    if kind == "dense":
        shared = moe.DenseExpert(
            jnp.asarray(rng.normal(size=(2 * SHARED, HIDDEN)) / 8, dtype),
            jnp.asarray(rng.normal(size=(HIDDEN, SHARED)) / 8, dtype),
            shared_gate=jnp.asarray(rng.normal(size=HIDDEN) / 8, dtype),
        )
    elif kind == "packed":
        shared = random_weights(rng, hidden=HIDDEN, intermediate=SHARED, num_experts=1)
    return x, (ids, routes), router, weights, shared


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def sum_of_the_ops_alone(x, topk, weights, shared, plan):
    out = moe.fused_moe(x, weights, *topk, plan=plan.routed)
    if shared is None:
        return out
    if isinstance(shared, moe.DenseExpert):
        second = moe.dense_mlp(x, shared)
    else:
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        second = moe.fused_moe(x, shared, jnp.zeros_like(ones, jnp.int32), ones, plan=plan.shared)
    return (out.astype(jnp.float32) + second.astype(jnp.float32)).astype(x.dtype)


# What the routed plan tolerates, times what is in the block.
ORDERS = [
    # implementation, tokens, router, shared, overlap, order
    ("split", 1, True, "dense", "auto", "concurrent"),
    ("split", 8, False, "dense", "auto", "concurrent"),
    ("split", 8, True, "packed", "auto", "concurrent"),
    ("split", 8, True, "dense", "off", "serial"),
    ("split", 8, True, "none", "auto", "serial"),
    ("fused", 1, True, "dense", "auto", "pre_resident"),
    ("fused", 7, True, "packed", "auto", "pre_resident"),
    ("fused", 7, False, "dense", "auto", "serial"),
    ("fused", 7, True, "dense", "off", "serial"),
    ("fused", 8, True, "dense", "auto", "serial"),
    ("fused", 64, True, "packed", "auto", "serial"),
    ("dynamic", 200, True, "dense", "auto", "serial"),
    ("dynamic", 200, True, "packed", "auto", "serial"),
]


@pytest.mark.parametrize("device", [H200, capability.CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize(
    ("implementation", "num_tokens", "router", "shared", "overlap", "order"), ORDERS
)
def test_the_plan_gives_the_order_and_says_why(
    recipe, device, implementation, num_tokens, router, shared, overlap, order
):
    facts = {
        "router": router,
        "overlap": overlap,
        "recipe": recipe,
        "implementation": implementation,
        "num_tokens": num_tokens,
        "device": device,
    }
    plan = make_plan(shared, **facts)
    assert plan.order == order
    assert plan.streams == (order != "serial")
    assert plan.reasons
    assert f"order           {order}" in plan.explain()
    assert all(reason in plan.explain() for reason in plan.reasons)
    # A pure function gives equal values, which can be keys.
    assert {plan: order}[make_plan(shared, **facts)] == order


def test_a_packed_shared_expert_beside_other_work_is_no_resident_grid():
    beside = make_plan("packed", implementation="split")
    assert beside.shared.implementation == "split"
    assert beside.workspace_bytes == 0
    alone = make_plan("packed", implementation="split", overlap="off")
    assert alone.shared.implementation == "fused"
    assert alone.workspace_bytes == 512


STEPS = {
    "concurrent": ["fork", "shared on aux", "router", "routed", "join", "add"],
    "pre_resident": ["fork", "shared on aux", "router", "join", "routed", "add"],
    "serial": ["router", "routed", "shared", "add"],
}


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("order", STEPS)
def test_the_handler_submits_in_the_order_of_the_plan(rng, kind, order):
    x, _, router, weights, shared = make_inputs(rng, kind)
    plan = make_plan(kind, implementation="split" if order == "concurrent" else "fused")
    plan = dataclasses.replace(plan, order=order)
    with moe.record_launches() as launches:
        moe.moe_block(x, weights, router=router, shared=shared, plan=plan).out.block_until_ready()
    assert [launch["steps"] for launch in launches] == [STEPS[order]]


def test_without_a_shared_expert_nothing_is_forked_or_added(rng):
    x, topk, router, weights, _ = make_inputs(rng, "none")
    with moe.record_launches() as launches:
        for given in ({"router": router}, {"topk": topk}):
            plan = make_plan("none", router="router" in given)
            jax.block_until_ready(moe.moe_block(x, weights, **given, plan=plan))
    assert [launch["steps"] for launch in launches] == [["router", "routed"], ["routed"]]


def test_nested_records_each_get_what_was_submitted_while_they_were_open(rng):
    x, topk, router, weights, _ = make_inputs(rng, "none")

    def submit(**given):
        plan = make_plan("none", router="router" in given)
        jax.block_until_ready(moe.moe_block(x, weights, **given, plan=plan))

    with moe.record_launches() as outer:
        submit(router=router)
        with moe.record_launches() as inner:
            submit(topk=topk)
        submit(router=router)
    submit(topk=topk)
    with_router, given_routes = ["router", "routed"], ["routed"]
    assert [launch["steps"] for launch in inner] == [given_routes]
    assert [launch["steps"] for launch in outer] == [with_router, given_routes, with_router]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("kind", ["none", "dense", "packed"])
def test_every_order_gives_the_bits_of_the_ops_alone(rng, kind, recipe, dtype):
    x, topk, _, weights, shared = make_inputs(rng, kind, dtype=dtype)
    results = []
    for implementation in ("fused", "split"):
        plan = make_plan(
            kind, router=False, recipe=recipe, dtype=dtype, implementation=implementation
        )
        for order in ("concurrent", "pre_resident", "serial"):
            forced = dataclasses.replace(plan, order=order)
            call = jax.jit(
                lambda x, t, w, s, p=forced: moe.moe_block(x, w, topk=t, shared=s, plan=p)
            )
            results.append(call(x, topk, weights, shared).out)
    expected = sum_of_the_ops_alone(x, topk, weights, shared, plan)
    assert np.isfinite(np.asarray(expected, np.float32)).all()
    for result in results:
        np.testing.assert_array_equal(bits(result), bits(expected))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": False, "scale": 2.5},
        {"scoring": "sigmoid", "num_groups": 2, "topk_groups": 1},
    ],
    ids=["softmax", "scaled", "grouped"],
)
def test_the_router_in_the_block_is_the_router_alone(rng, options):
    x, _, router, weights, shared = make_inputs(rng, "dense")
    bias = jnp.asarray(rng.normal(size=EXPERTS), jnp.float32)
    router = dataclasses.replace(router, bias=bias, **options)
    mask = jnp.asarray([True, True, False, True, True])
    plan = make_plan("dense")
    result = moe.moe_block(x, weights, router=router, shared=shared, token_mask=mask, plan=plan)
    ids, route_weights, _ = routing.route(
        x, router.weight, bias, top_k=TOP_K, token_mask=mask, **options
    )
    np.testing.assert_array_equal(result.topk_ids, ids)
    np.testing.assert_array_equal(bits(result.topk_weights), bits(route_weights))
    expected = sum_of_the_ops_alone(x, (ids, route_weights), weights, shared, plan)
    np.testing.assert_array_equal(bits(result.out), bits(expected))
    assert (np.asarray(ids)[2] == -1).all()


def test_a_gate_scales_a_packed_shared_expert(rng):
    x, topk, _, weights, shared = make_inputs(rng, "packed", dtype="float32")
    gate = jnp.asarray(rng.normal(size=HIDDEN) / 8, jnp.float32)
    plan = make_plan("packed", router=False, dtype="float32")
    gated = moe.moe_block(x, weights, topk=topk, shared=shared, shared_gate=gate, plan=plan).out
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    ids = jnp.zeros_like(ones, jnp.int32)
    expected = moe.reference.moe(x, weights, *topk) + (
        jax.nn.sigmoid(x @ gate)[:, None] * moe.reference.moe(x, shared, ids, ones)
    )
    # The kernels and the oracle add the same products in other orders: about sqrt(n) * 2**-24.
    np.testing.assert_allclose(gated, expected, rtol=1e-4, atol=1e-5)


def test_a_nan_stays_in_its_token(rng):
    x, topk, _, weights, shared = make_inputs(rng, "dense")
    x = x.at[2, 5].set(jnp.nan)
    plan = make_plan("dense", router=False)
    out = np.asarray(moe.moe_block(x, weights, topk=topk, shared=shared, plan=plan).out, np.float32)
    assert np.isnan(out[2]).all()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_vmap_over_tokens_is_one_block_of_more_tokens(rng, kind):
    x, _, router, weights, shared = make_inputs(rng, kind, num_tokens=6)
    plan = make_plan(kind, num_tokens=3)

    def block(x):
        return moe.moe_block(x, weights, router=router, shared=shared, plan=plan)

    with moe.record_launches() as launches:
        mapped = jax.block_until_ready(jax.vmap(block)(x.reshape(2, 3, HIDDEN)))
    assert len(launches) == 1
    whole = moe.moe_block(
        x, weights, router=router, shared=shared, plan=make_plan(kind, num_tokens=6)
    )
    for one, other in zip(mapped, whole, strict=True):
        np.testing.assert_array_equal(bits(one).reshape(other.shape), bits(other))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_inside_shard_map_each_device_runs_its_tokens(rng, kind, check_vma):
    x, _, router, weights, shared = make_inputs(rng, kind, num_tokens=6)
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])
    plan = make_plan(kind, num_tokens=3)
    mapped = jax.jit(
        jax.shard_map(
            lambda x: moe.moe_block(x, weights, router=router, shared=shared, plan=plan),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            check_vma=check_vma,
        )
    )
    apart = mapped(jax.device_put(x, NamedSharding(mesh, P("d"))))
    whole = moe.moe_block(
        x, weights, router=router, shared=shared, plan=make_plan(kind, num_tokens=6)
    )
    for one, other in zip(apart, whole, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_an_exported_block_gives_the_same_bits(rng):
    x, _, router, weights, shared = make_inputs(rng, "dense")
    plan = make_plan("dense")

    def block(x):
        return tuple(moe.moe_block(x, weights, router=router, shared=shared, plan=plan))

    stable = jax.export.DisabledSafetyCheck.custom_call(moe.BLOCK_TARGET)
    exported = jax.export.export(jax.jit(block), disabled_checks=[stable])(x)
    again = jax.export.deserialize(exported.serialize())
    for one, other in zip(again.call(x), block(x), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_differentiating_says_what_to_differentiate_instead(rng):
    x, topk, _, weights, shared = make_inputs(rng, "dense", dtype="float32")
    plan = make_plan("dense", router=False, dtype="float32")

    def loss(x):
        return moe.moe_block(x, weights, topk=topk, shared=shared, plan=plan).out.sum()

    with pytest.raises(NotImplementedError, match=r"moe_block is inference-only.*reference\.moe"):
        jax.grad(loss)(x)


def test_no_tokens_give_nothing(rng):
    x, _, router, weights, shared = make_inputs(rng, "dense", num_tokens=0)
    plan = make_plan("dense", num_tokens=0)
    result = moe.moe_block(x, weights, router=router, shared=shared, plan=plan)
    assert result.out.shape == (0, HIDDEN)
    assert result.topk_ids.shape == (0, TOP_K)


def test_the_block_leases_its_stream_and_words(rng):
    x, _, router, weights, shared = make_inputs(rng, "dense")
    with workspace.WorkspacePool() as pool, pool.use():
        plan = make_plan("dense")
        call = jax.jit(lambda x: moe.moe_block(x, weights, router=router, shared=shared, plan=plan))
        compiled = call.lower(x).compile()
        (record,) = pool.records()
        assert (record.op, record.bytes, record.streams) == ("moe_block", plan.workspace_bytes, 1)
        jax.block_until_ready(compiled(x))
        del compiled, call


def test_arguments_that_contradict_the_plan_are_named(rng):
    x, topk, router, weights, dense = make_inputs(rng, "dense")
    packed = random_weights(rng, hidden=HIDDEN, intermediate=SHARED, num_experts=1)
    plan = make_plan("dense")
    given = {"router": router, "shared": dense}

    def call(**changes):
        return moe.moe_block(x, weights, **{**given, "plan": plan, **changes})

    call()
    with pytest.raises(ValueError, match="exactly one of router and topk"):
        call(topk=topk)
    with pytest.raises(ValueError, match="exactly one of router and topk"):
        call(router=None)
    with pytest.raises(ValueError, match="topk is given, but the plan was made for a router"):
        call(router=None, topk=topk)
    with pytest.raises(TypeError, match=r"shared is a ExpertWeights.*DenseExpert"):
        call(shared=packed)
    with pytest.raises(TypeError, match=r"shared is a NoneType.*DenseExpert"):
        call(shared=None)
    with pytest.raises(ValueError, match="shared_gate of its own"):
        call(shared_gate=jnp.zeros(HIDDEN))
    with pytest.raises(ValueError, match=r"shared\.intermediate is 48.*32"):
        call(plan=dataclasses.replace(plan, shared=moe.DensePlan(32)))
    with pytest.raises(ValueError, match=r"router\.weight has 5 rows"):
        call(router=moe.RouterParams(router.weight[:5]))
    with pytest.raises(TypeError, match="must be a BlockPlan"):
        call(plan=plan.routed)
    with pytest.raises(ValueError, match="num_tokens is 5, but the plan was made for 4"):
        call(plan=make_plan("dense", num_tokens=4))


def test_plans_that_do_not_belong_together_are_refused():
    routed = routed_plan()
    for wrong, message in (
        (dataclasses.replace(shared_plan("packed", routed), num_experts=2), r"shared\.num_experts"),
        (shared_plan("packed", routed_plan(num_tokens=4)), r"shared\.num_tokens is 4"),
        (shared_plan("packed", routed_plan(dtype="float16")), r"shared\.dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.plan_block(routed, router=True, shared=wrong)
    with pytest.raises(ValueError, match="compose"):
        moe.plan_block(routed_plan(implementation="reference"), router=True)
    with pytest.raises(ValueError, match="overlap is 'on'"):
        moe.plan_block(routed, router=True, overlap="on")
    with pytest.raises(TypeError, match="routed"):
        moe.plan_block("fused", router=True)
    with pytest.raises(TypeError, match="router is 'softmax'; it must be True"):
        moe.plan_block(routed, router="softmax")
    with pytest.raises(ValueError, match="intermediate is 24"):
        moe.DensePlan(24)
