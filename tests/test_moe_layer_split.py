"""``MoELayer`` split over a mesh: the same sum, each device with its part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from layer_inputs import (
    HIDDEN,
    INTERMEDIATE,
    SPLITS,
    assert_within_fp32,
    make_layer,
    make_params,
    make_x,
    mesh_of,
    oracle,
    pool_of,
    run,
    split_layer,
)

from jax_b12x import lane, moe
from jax_b12x.moe import layer_routes, sharding

P = PartitionSpec


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
def test_split_over_a_mesh_the_layer_gives_what_one_device_gives(rng, split, recipe, shared_format):
    layer = split_layer(split, recipe=recipe, shared_format=shared_format)
    params, x = make_params(rng, layer, bias=True), make_x(rng, 5)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=layer.world_size)


@pytest.mark.parametrize("split", ["tensor 2", "experts 2", "tensor 2 x experts 2"])
def test_split_layers_output_has_the_bits_of_its_parts_added_in_rank_order(rng, split):
    layer = split_layer(split, recipe="nvfp4")
    params, x = make_params(rng, layer), make_x(rng, 4)
    alone = make_layer(
        intermediate=layer.local.intermediate,
        shared_intermediate=layer.local.shared_intermediate,
        num_experts=layer.num_experts,
    )
    whole = np.zeros(x.shape, np.float32)
    for expert_part in range(layer.expert_parts):
        for tensor_part in range(layer.tensor_parts):
            rank = expert_part * layer.tensor_parts + tensor_part
            kept = np.arange(layer.num_experts) // layer.local.num_experts == expert_part
            experts = sharding.split_experts(
                params.experts, tensor_parts=layer.tensor_parts, tensor_part=tensor_part
            )
            # All experts are here, those of other devices give nothing.
            experts = dataclasses.replace(experts, w2=jnp.where(kept[:, None, None], experts.w2, 0))
            shared = sharding.split_dense(params.shared, layer.world_size, rank)
            part = dataclasses.replace(params, experts=experts, shared=shared)
            whole = whole + np.asarray(jax.jit(alone)(x, part))
    np.testing.assert_array_equal(run(layer, params, x), whole)


def test_every_device_gets_the_same_bits_and_so_does_a_rerun(rng):
    layer = split_layer("tensor 2 x experts 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    with pool_of(layer) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool))
        prepared = layer.prepare(params)
        outs = [
            np.asarray(shard.data)
            for _ in range(2)
            for shard in step(x, prepared).addressable_shards
        ]
    assert len(outs) == 8
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_of_the_caller_the_layer_gives_the_same_bits(rng, check_vma):
    layer = split_layer("tensor 2 x experts 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared = layer.prepare(params)
    with pool_of(layer) as pool:
        inside = jax.jit(
            jax.shard_map(
                lambda x, p: layer(x, p, pool=pool),
                mesh=layer.mesh,
                in_specs=(P(), layer.param_specs(prepared)),
                out_specs=P(),
                check_vma=check_vma,
            )
        )
        np.testing.assert_array_equal(inside(x, prepared), run(layer, params, x))


def test_there_is_one_reduction_whatever_the_split(rng):
    layer = split_layer("tensor 2 x experts 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    with pool_of(layer) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool))
        step(x, layer.prepare(params)).block_until_ready()
        (record,) = pool.records()
        assert record.op == "all_reduce"
        assert record.ranks == 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("split", ["tensor 2", "experts 2"])
def test_in_16_bits_each_devices_part_is_rounded_once_and_so_is_the_sum(rng, dtype, split):
    layer = split_layer(split, recipe="w4a16")
    params, x = make_params(rng, layer, dtype=dtype), make_x(rng, 5, dtype)
    out = np.asarray(run(layer, params, x), np.float64)
    whole, magnitude = oracle(layer, x, params)
    # Rounded: the intermediates of every route (into sums of many, so by a walk), the routed sum,
    # the device's part, and the sum over devices.
    unit = float(jnp.finfo(dtype).eps) / 2
    bound = (2 + 1 + 16 / np.sqrt(INTERMEDIATE)) * unit * 2 * np.maximum(magnitude, magnitude.max())
    assert np.all(np.abs(out - whole) <= bound)


@pytest.mark.parametrize(("num_experts", "ranks"), [(5, 2), (7, 2), (5, 4), (9, 4)])
def test_experts_that_do_not_split_evenly_are_padded(rng, num_experts, ranks):
    layer = make_layer(num_experts=num_experts, mesh=mesh_of(ep=ranks), expert_axis="ep")
    assert ranks * layer.local.num_experts > num_experts
    params, x = make_params(rng, layer), make_x(rng, 6)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=ranks)


def test_ids_behind_the_last_expert_do_not_meet_the_padding(rng):
    def router(logits, token_mask):
        ids = jnp.tile(jnp.array([[5, 1, 6]], jnp.int32), (logits.shape[0], 1))
        return ids, jnp.full(ids.shape, 0.5, jnp.float32)

    layer = make_layer(num_experts=5, mesh=mesh_of(ep=2), expert_axis="ep", router=router)
    params, x = make_params(rng, layer), make_x(rng, 3)
    out = run(layer, params, x)
    one = make_layer(num_experts=5, router=router)
    np.testing.assert_allclose(out, jax.jit(one)(x, params), rtol=0, atol=2e-6)


@pytest.mark.parametrize("top_k", [3, 6])
@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 4}, {"tp": 2}, {"ep": 2, "tp": 2}])
def test_weights_of_an_expert_that_a_router_names_twice_add_up(rng, top_k, num_tokens, axes):
    def router(logits, token_mask):
        row = jnp.array([1, 6, 1, -1, 1, 6][:top_k], jnp.int32)
        ids = jnp.tile(row, (logits.shape[0], 1))
        return ids, jnp.tile(jnp.arange(1.0, top_k + 1), (len(ids), 1))

    names = {"expert_axis": "ep", "tensor_axis": "tp"}
    split = {field: name for field, name in names.items() if name in axes}
    layer = make_layer(router=router, top_k=top_k, mesh=mesh_of(**axes), **split)
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=layer.world_size)


def test_a_device_whose_experts_no_token_goes_to_gives_the_shared_expert_alone(rng):
    layer = make_layer(mesh=mesh_of(ep=2), expert_axis="ep", top_k=2)
    params, x = make_params(rng, layer), make_x(rng, 4)
    # The first two experts win always, and both are on the first device.
    router = np.zeros((8, HIDDEN), np.float32)
    router[:2, 0] = [100, 101]
    x = x.at[:, 0].set(1)
    params = dataclasses.replace(params, router=jnp.asarray(router))
    poisoned = dataclasses.replace(
        params.experts, w2_global_scale=params.experts.w2_global_scale.at[4:].set(jnp.nan)
    )
    out = run(layer, dataclasses.replace(params, experts=poisoned), x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=2)


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_device_may_hold_fewer_experts_than_a_token_has_routes(rng, ranks):
    layer = make_layer(top_k=5, mesh=mesh_of(ep=ranks), expert_axis="ep", shared_intermediate=128)
    assert layer.local.num_experts < layer.top_k
    params, x = make_params(rng, layer), make_x(rng, 6)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=ranks)


def test_local_routes_keep_the_order_of_those_that_are_left():
    ids = jnp.array([[3, 6, 2, 7, 0], [-1, 9, 2, 3, 12]], jnp.int32)
    weights = jnp.arange(10, dtype=jnp.float32).reshape(2, 5)
    local, chosen = layer_routes.local_routes(ids, weights, num_experts=10, first=2, count=4)
    np.testing.assert_array_equal(local, [[1, 0, -1, -1], [0, 1, -1, -1]])
    np.testing.assert_array_equal(chosen[:, :2], [[0, 2], [7, 8]])


@pytest.mark.parametrize("split", ["tensor 2", "tensor 2 x experts 2"])
def test_mxfp4_experts_split_by_blocks_of_32(rng, split):
    layer = split_layer(split, recipe="w4a16", weight_format="mxfp4", activation=moe.SWIGLU_OAI)
    params, x = make_params(rng, layer, bias=True), make_x(rng, 5)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=layer.world_size)


def test_channels_of_two_lanes_are_apart(rng):
    layer = split_layer("tensor 2")
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    with pool_of(layer) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool))
        outs = []
        for name in ("target", "draft"):
            with lane(name):
                outs.append(np.asarray(step(x, params)))
        np.testing.assert_array_equal(*outs)
        records = pool.records()
        assert sorted(record.lane for record in records) == ["draft", "target"]
        assert len({record.executable for record in records}) == 2


@pytest.mark.parametrize("isolation", ["executable", "lane"])
def test_inside_pool_ordered_layers_share_one_channel(rng, isolation):
    layer = split_layer("tensor 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared = layer.prepare(params)

    with pool_of(layer, isolation=isolation) as pool:

        def body(x, p):
            with pool.ordered():
                for _ in range(3):
                    x = layer(x, p, pool=pool)
                return x

        specs = (P(), layer.param_specs(prepared))
        step = jax.jit(jax.shard_map(body, mesh=layer.mesh, in_specs=specs, out_specs=P()))
        out = jax.block_until_ready(step(x, prepared))
        assert len(pool.records()) == 1
    expected = x
    for _ in range(3):
        expected = run(layer, params, expected)
    np.testing.assert_array_equal(out, expected)


def test_experts_that_were_loaded_split_stay_where_they_are(rng, tmp_path):
    layer = split_layer("experts 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    moe.save_experts(tmp_path, {"experts": params.experts})
    loaded = moe.load_experts(
        tmp_path, "experts", device=NamedSharding(layer.mesh, PartitionSpec("ep"))
    )
    prepared = layer.prepare(dataclasses.replace(params, experts=loaded))
    for before, after in zip(
        loaded.w13.addressable_shards, prepared.experts.w13.addressable_shards, strict=True
    ):
        assert before.data.unsafe_buffer_pointer() == after.data.unsafe_buffer_pointer()
    whole = layer.prepare(params)
    with pool_of(layer) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool))
        np.testing.assert_array_equal(step(x, prepared), step(x, whole))


def test_each_device_holds_its_part_alone(rng):
    layer = split_layer("tensor 2 x experts 2")
    prepared = layer.prepare(make_params(rng, layer))
    for array in jax.tree.leaves((prepared.experts, prepared.shared)):
        parts = [shard.data.size for shard in array.addressable_shards]
        assert parts == [array.size // 4 if array.ndim else 1] * 4


def test_a_mesh_of_one_device_gives_what_no_mesh_gives(rng):
    layer = make_layer(mesh=mesh_of(tp=1), tensor_axis="tp")
    params, x = make_params(rng, layer), make_x(rng, 4)
    np.testing.assert_array_equal(run(layer, params, x), jax.jit(make_layer())(x, params))
