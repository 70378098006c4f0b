"""The joined shared expert: prepared among the routed experts, it gives what it gives by itself."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from layer_inputs import (
    HIDDEN,
    INTERMEDIATE,
    assert_within_fp32,
    make_layer,
    make_params,
    make_x,
    mesh_of,
    oracle,
    reference_moe,
)

from jax_b12x import capability, comm, moe
from jax_b12x.moe import joined, routing
from jax_b12x.moe.joined import JoinedExpert

H200 = capability.KNOWN["h200"]
ARRAYS = [f.name for f in dataclasses.fields(moe.ExpertWeights) if not f.metadata.get("static")]


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def joined_layer(count=1, **changes):
    return make_layer(
        shared_format="nvfp4", **{"shared_intermediate": count * INTERMEDIATE, **changes}
    )


def run(layer, params, x, **options):
    """Runs a layer with prepared parameters, over its mesh where it has one."""
    if layer.mesh is None:
        return np.asarray(jax.jit(lambda x, p: layer(x, p, **options))(x, params))
    with comm.ChannelPool(layer.mesh, layer.axes) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool, **options))
        return np.asarray(step(x, params))


def assert_same_weights(actual, expected):
    for name in ARRAYS:
        one, other = np.asarray(getattr(actual, name)), np.asarray(getattr(expected, name))
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert one.tobytes() == other.tobytes(), name
    for name in ("format", "hidden", "intermediate", "layout"):
        assert getattr(actual, name) == getattr(expected, name)


@pytest.mark.parametrize(
    ("count", "bias", "num_tokens"), [(1, False, 1), (1, True, 40), (2, True, 6), (3, False, 40)]
)
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
def test_a_joined_layer_gives_what_the_oracle_gives(rng, count, recipe, bias, num_tokens):
    layer = joined_layer(count, recipe=recipe)
    params, x = make_params(rng, layer, bias=bias), make_x(rng, num_tokens)
    prepared = layer.prepare(params)
    assert prepared.joined == count
    assert prepared.experts.num_experts == layer.num_experts + count
    out = run(layer, prepared, x)
    whole, magnitude = oracle(layer, x, params)
    width = count * INTERMEDIATE
    assert_within_fp32(out, whole, magnitude, world_size=1, intermediate=width)


SPLITS = {
    "tensor 2": ({"tp": 2}, 1),
    "experts 2": ({"ep": 2}, 2),
    "tensor 2 x experts 2": ({"ep": 2, "tp": 2}, 2),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("recipe", "num_tokens"), [("w4a16", 5), ("nvfp4", 5), ("nvfp4", 40)])
def test_over_a_mesh_each_device_joins_its_part(rng, split, count, recipe, num_tokens):
    axes, width = SPLITS[split]
    named = {"tp": "tensor_axis", "ep": "expert_axis"}
    layer = joined_layer(
        count * width,
        recipe=recipe,
        mesh=mesh_of(**axes),
        **{field: axis for axis, field in named.items() if axis in axes},
    )
    params, x = make_params(rng, layer, bias=True), make_x(rng, num_tokens)
    prepared = layer.prepare(params)
    assert prepared.joined == count
    held = (layer.local.num_experts + count) * layer.world_size
    assert prepared.experts.num_experts == held
    out = run(layer, prepared, x)
    whole, magnitude = oracle(layer, x, params)
    assert_within_fp32(
        out,
        whole,
        magnitude,
        world_size=layer.world_size,
        intermediate=count * width * INTERMEDIATE,
    )


@pytest.mark.parametrize("num_experts", [5, 7])
def test_experts_that_do_not_split_evenly_are_padded_before_the_joined_one(rng, num_experts):
    layer = joined_layer(2, num_experts=num_experts, mesh=mesh_of(ep=2), expert_axis="ep")
    params, x = make_params(rng, layer), make_x(rng, 6)
    prepared = layer.prepare(params)
    assert prepared.joined == 1
    whole, magnitude = oracle(layer, x, params)
    out = run(layer, prepared, x)
    assert_within_fp32(out, whole, magnitude, world_size=2, intermediate=2 * INTERMEDIATE)


def test_experts_that_were_loaded_split_are_joined_where_they_are(rng, tmp_path):
    layer = joined_layer(2, mesh=mesh_of(ep=2), expert_axis="ep")
    params, x = make_params(rng, layer), make_x(rng, 4)
    moe.save_experts(tmp_path, {"experts": params.experts})
    loaded = moe.load_experts(
        tmp_path, "experts", device=NamedSharding(layer.mesh, PartitionSpec("ep"))
    )
    prepared = layer.prepare(dataclasses.replace(params, experts=loaded))
    assert prepared.joined == 1
    whole = layer.prepare(params)
    np.testing.assert_array_equal(run(layer, prepared, x), run(layer, whole, x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("count", [1, 2])
def test_in_16_bits_joined_and_serial_differ_by_their_roundings_alone(rng, dtype, recipe, count):
    layer = joined_layer(count, recipe=recipe)
    params, x = make_params(rng, layer, dtype=dtype), make_x(rng, 8, dtype)
    wide = np.float64
    out = run(layer, layer.prepare(params), x).astype(wide)
    in_a_row = dataclasses.replace(layer, overlap="off")
    serial = run(in_a_row, in_a_row.prepare(params), x).astype(wide)
    # The serial order's two addends, as it rounds them.
    alone = dataclasses.replace(layer, shared_intermediate=0)
    routed = run(alone, dataclasses.replace(params, shared=None), x).astype(wide)
    zeros, ones = jnp.zeros((len(x), 1), jnp.int32), jnp.ones((len(x), 1), jnp.float32)
    shared = np.asarray(moe.fused_moe(x, params.shared, zeros, ones, recipe=recipe), wide)
    # Serial rounds both and their sum, joined the sum alone: each by at most half a unit in the
    # last place, or half of the smallest number. Before that both add the same products in fp32, in
    # other orders where the shared expert is cut in two.
    unit, least = float(jnp.finfo(dtype).eps) / 2, float(jnp.finfo(dtype).smallest_subnormal)
    addends = np.abs(routed) + np.abs(shared)
    sums = np.abs(serial) + np.abs(out)
    order = 64 * 2.0**-24 * np.maximum(addends, addends.mean())
    assert np.all(np.abs(out - serial) <= unit * (addends + sums) + 2 * least + order)


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("count", [1, 2])
def test_fused_and_split_give_the_same_bits_with_a_joined_expert(rng, recipe, count):
    layer = joined_layer(count, recipe=recipe)
    params, x = make_params(rng, layer), make_x(rng, 5)
    prepared = layer.prepare(params)
    outs = []
    for implementation in ("fused", "split"):
        plan = layer.plan(5, dtype=jnp.float32, implementation=implementation)
        assert (plan.routed.implementation, plan.order) == (implementation, "joined")
        outs.append(jax.jit(lambda x, p, plan=plan: layer.partial(x, p, plan=plan))(x, prepared))
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("count", [1, 2])
def test_one_launch_after_the_router_is_all_that_is_submitted(rng, count):
    layer = joined_layer(count)
    params, x = make_params(rng, layer), make_x(rng, 4)
    with moe.record_launches() as launches:
        run(layer, layer.prepare(params), x)
    assert [launch["steps"] for launch in launches] == [["router", "routed"]]
    in_a_row = dataclasses.replace(layer, overlap="off")
    with moe.record_launches() as launches:
        run(in_a_row, in_a_row.prepare(params), x)
    assert [launch["steps"] for launch in launches] == [["router", "routed", "shared", "add"]]


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_a_custom_router_and_grouped_scores_join_as_well(rng, num_tokens):
    def router(logits, token_mask):
        return routing.softmax_topk(logits, 3, token_mask=token_mask)

    for layer in (
        joined_layer(2, router=router),
        joined_layer(2, router="sigmoid", num_groups=4, topk_groups=2, routed_scaling_factor=2.5),
    ):
        params, x = make_params(rng, layer), make_x(rng, num_tokens)
        whole, magnitude = oracle(layer, x, params)
        out = run(layer, layer.prepare(params), x)
        assert_within_fp32(out, whole, magnitude, world_size=1, intermediate=2 * INTERMEDIATE)


@pytest.mark.parametrize("split", [None, "experts 2"])
@pytest.mark.parametrize("num_tokens", [5, 40])
def test_padding_gets_the_shared_expert_alone_and_a_nan_stays_in_its_token(rng, split, num_tokens):
    mesh = {} if split is None else {"mesh": mesh_of(ep=2), "expert_axis": "ep"}
    layer = joined_layer(2, **mesh)
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    prepared = layer.prepare(params)
    mask = jnp.arange(num_tokens) != 1
    out = run(layer, prepared, x, token_mask=mask)
    np.testing.assert_array_equal(np.delete(out, 1, 0), np.delete(run(layer, prepared, x), 1, 0))
    zeros, ones = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.float32)
    alone = np.asarray(reference_moe(x[1:2], params.shared, zeros, ones, recipe="nvfp4"))
    magnitude = np.full_like(alone, np.abs(alone).max())
    width = 2 * INTERMEDIATE
    assert_within_fp32(out[1:2], alone, magnitude, world_size=2, intermediate=width)
    bad = run(layer, prepared, x.at[2, 3].set(jnp.nan))
    assert np.isnan(bad[2]).all()
    np.testing.assert_array_equal(np.delete(bad, 2, 0), np.delete(run(layer, prepared, x), 2, 0))


def test_vmap_over_tokens_and_no_tokens(rng):
    layer = joined_layer(2)
    params, x = make_params(rng, layer), make_x(rng, 6)
    prepared = layer.prepare(params)
    mapped = jax.vmap(lambda x: layer(x, prepared))(x.reshape(2, 3, HIDDEN))
    np.testing.assert_array_equal(mapped.reshape(6, HIDDEN), run(layer, prepared, x))
    assert layer(x[:0], prepared).shape == (0, HIDDEN)


def test_differentiating_a_joined_layer_says_what_to_train(rng):
    layer = joined_layer()
    params, x = make_params(rng, layer), make_x(rng, 3)
    prepared = layer.prepare(params)
    for tokens in (x, jnp.tile(x, (20, 1))):
        with pytest.raises(NotImplementedError, match=r"MoELayer is inference-only.*; train with"):
            jax.jit(jax.grad(lambda x: layer(x, prepared).sum()))(tokens)


@pytest.mark.parametrize(("count", "bias"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("device", [capability.CPU, H200], ids=["checkpoint layout", "sm90 layout"])
def test_what_was_joined_comes_apart_bit_for_bit(rng, count, bias, device):
    layer = joined_layer(count, num_experts=5)
    params = make_params(rng, layer, bias=bias)
    plan = layer.plan(1, device=device).routed
    both, among = joined.join(params.experts, params.shared, count, plan)
    assert both.layout == plan.weight_layout
    assert both.num_experts == 5 + count
    apart = dataclasses.replace(params, experts=both, shared=among).unprepare()
    assert_same_weights(apart.experts, params.experts)
    assert_same_weights(apart.shared, params.shared)
    # Packed together they have the bytes that they have packed alone.
    routed = params.experts.prepare(dataclasses.replace(plan, num_experts=5))
    np.testing.assert_array_equal(both.w13[:5], routed.w13)
    np.testing.assert_array_equal(both.w2[:5], routed.w2)
    if count == 1:
        again = joined.join(
            routed, params.shared.prepare(dataclasses.replace(plan, num_experts=1)), 1, plan
        )[0]
        assert_same_weights(again, both)


def test_prepared_parameters_may_be_prepared_again_and_taken_apart(rng):
    layer = joined_layer(2)
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared = layer.prepare(params)
    again = layer.prepare(prepared)
    assert isinstance(again.shared, JoinedExpert)
    assert_same_weights(again.experts, prepared.experts)
    apart = prepared.unprepare()
    assert_same_weights(apart.experts, params.experts)
    assert_same_weights(apart.shared, params.shared)
    in_a_row = dataclasses.replace(layer, overlap="off")
    of_apart = run(in_a_row, in_a_row.prepare(prepared), x)
    np.testing.assert_array_equal(of_apart, run(in_a_row, in_a_row.prepare(params), x))


def test_donated_experts_are_freed_as_they_are_joined(rng):
    layer = joined_layer(2)
    params, x = make_params(rng, layer), make_x(rng, 4)
    whole, magnitude = oracle(layer, x, params)
    prepared = layer.prepare(params, donate=True)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert getattr(params.experts, name).is_deleted()
    out = run(layer, prepared, x)
    assert_within_fp32(out, whole, magnitude, world_size=1, intermediate=2 * INTERMEDIATE)


def test_other_input_scales_stay_apart_where_they_count(rng):
    for recipe, count in (("nvfp4", 0), ("w4a16", 1)):
        layer = joined_layer(recipe=recipe)
        params, x = make_params(rng, layer), make_x(rng, 4)
        other = dataclasses.replace(params.shared, w13_input_scale=jnp.float32(0.02))
        params = dataclasses.replace(params, shared=other)
        prepared = layer.prepare(params)
        assert prepared.joined == count
        assert prepared.unprepare().shared.w13_input_scale == jnp.float32(0.02)
        out = run(layer, prepared, x)
        assert_within_fp32(out, *oracle(layer, x, params), world_size=1)
    why = joined.obstacle(params.experts, params.shared, "nvfp4")
    assert why == (
        "the shared expert's w13_input_scale is 0.02 and the routed experts' 0.01: one launch "
        "quantizes x once"
    )


@pytest.mark.parametrize("whose", ["shared", "routed"])
def test_biases_of_one_of_the_two_alone_keep_them_apart(rng, whose):
    layer = joined_layer()
    plain, biased = make_params(rng, layer), make_params(rng, layer, bias=True)
    if whose == "shared":
        params = dataclasses.replace(plain, shared=biased.shared)
    else:
        params = dataclasses.replace(plain, experts=biased.experts)
    x = make_x(rng, 4)
    why = joined.obstacle(params.experts, params.shared, "w4a16")
    assert f"only the {whose} have a w13_bias" in why
    prepared = layer.prepare(params)
    assert prepared.joined == 0
    assert_within_fp32(run(layer, prepared, x), *oracle(layer, x, params), world_size=1)


def test_parameters_plans_and_layers_that_do_not_go_together_are_named(rng):
    layer = joined_layer(2)
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared = layer.prepare(params)
    remedy = re.escape("call layer.prepare(params.unprepare())")
    for changes, why in (
        ({"overlap": "off"}, "overlap is 'off'"),
        ({"shared_format": "dense"}, "it is dense"),
        ({"shared_intermediate": INTERMEDIATE}, "here it would be 1 of them"),
    ):
        other = dataclasses.replace(layer, **changes)
        with pytest.raises(ValueError, match=f"does not go with this layer: {why}.*{remedy}"):
            other.partial(x, prepared, plan=layer.plan(4, dtype=jnp.float32))
    apart = layer.plan(4, dtype=jnp.float32, joined=False)
    with pytest.raises(ValueError, match=r"plan\.joined is 0, but params\.joined is 2: make the"):
        layer.partial(x, prepared, plan=apart)
    with pytest.raises(ValueError, match=r"plan\.joined is 2.*layer\.plan\(num_tokens, joined=Fal"):
        layer.partial(x, params, plan=layer.plan(4, dtype=jnp.float32))
    fewer = jax.tree.map(lambda a: a[:9] if a.ndim else a, prepared.experts)
    with pytest.raises(ValueError, match=r"params\.experts\.num_experts is 9; the layer needs 10"):
        layer(x, dataclasses.replace(prepared, experts=fewer))
    split = joined_layer(2, mesh=mesh_of(tp=2), tensor_axis="tp")
    with pytest.raises(ValueError, match="donate is True, but the layer has a mesh"):
        split.prepare(params, donate=True)
    with pytest.raises(ValueError, match=r"params are split over \(1, 2\).*load them again"):
        split.prepare(params).unprepare()


def test_a_block_plan_for_a_joined_expert_is_refused_where_it_contradicts_itself():
    facts = {"hidden": 64, "intermediate": 32, "dtype": jnp.float32}
    routed = moe.plan("w4a16", num_tokens=4, num_experts=9, top_k=4, **facts)
    with pytest.raises(ValueError, match=r"joined is 4; it must be an integer within \[0, 3\]"):
        moe.plan_block(routed, router=True, joined=4)
    with pytest.raises(ValueError, match=r"joined is 1, and shared is a DensePlan"):
        moe.plan_block(routed, router=True, shared=moe.DensePlan(32), joined=1)
    with pytest.raises(ValueError, match=r"joined is 1, and overlap is 'off'"):
        moe.plan_block(routed, router=True, overlap="off", joined=1)


def test_a_blocks_router_has_a_row_for_each_expert_but_the_joined_ones(rng):
    layer = joined_layer(2)
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared, plan = layer.prepare(params), layer.plan(4, dtype=jnp.float32).block
    block = moe.moe_block(x, prepared.experts, router=moe.RouterParams(params.router), plan=plan)
    ids, weights, _ = routing.route(x, params.router, top_k=3, num_joined=2)
    np.testing.assert_array_equal(block.topk_ids, ids)
    np.testing.assert_array_equal(block.topk_weights, weights)
    assert np.asarray(ids)[:, 3:].tolist() == [[8, 9]] * 4
    given = moe.plan_block(plan.routed, router=False, joined=2)
    again = moe.moe_block(x, prepared.experts, topk=(ids, weights), plan=given)
    np.testing.assert_array_equal(again.out, block.out)
    wide = jnp.concatenate([params.router, params.router[:2]])
    with pytest.raises(ValueError, match="10 rows; the plan has 8 experts and 2 joined"):
        moe.moe_block(x, prepared.experts, router=moe.RouterParams(wide), plan=plan)
