"""``MoELayer``: on one device it is its parts; split over a mesh it is the same sum."""

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
)

from jax_b12x import comm, lane, moe, workspace
from jax_b12x.moe import layer_routes, sharding

P = PartitionSpec


@pytest.fixture
def rng():
    return np.random.default_rng(7)


SPLITS = {
    "tensor 2": {"axes": {"tp": 2}, "tensor_axis": "tp"},
    "experts 2": {"axes": {"ep": 2}, "expert_axis": "ep"},
    "experts 4": {"axes": {"ep": 4}, "expert_axis": "ep"},
    "tensor 2 x experts 2": {
        "axes": {"ep": 2, "tp": 2},
        "tensor_axis": "tp",
        "expert_axis": "ep",
    },
    "mesh in the other order": {
        "axes": {"tp": 2, "ep": 2},
        "tensor_axis": "tp",
        "expert_axis": "ep",
    },
}


def split_layer(split, **changes):
    fields = dict(SPLITS[split])
    return make_layer(mesh=mesh_of(**fields.pop("axes")), **fields, **changes)


def pool_of(layer, **options):
    return comm.ChannelPool(layer.mesh, layer.axes, **options)


def run(layer, params, x, **options):
    """Runs a layer that is split, outside ``shard_map``."""
    with pool_of(layer) as pool:
        step = jax.jit(lambda x, p: layer(x, p, pool=pool, **options))
        return np.asarray(step(x, layer.prepare(params)))


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_on_one_device_the_layer_is_the_sum_of_its_parts(rng, recipe, shared_format, num_tokens):
    layer = make_layer(recipe=recipe, shared_format=shared_format)
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    out = jax.jit(layer)(x, layer.prepare(params))
    assert_within_fp32(out, *oracle(layer, x, params), world_size=1)


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


@pytest.mark.parametrize("split", [None, "experts 2"])
def test_few_tokens_in_one_call_and_many_by_xlas_products_give_the_same(rng, split):
    layer = make_layer() if split is None else split_layer(split)
    params, x = make_params(rng, layer, bias=True), make_x(rng, 40)
    assert layer.plan(8).block is not None
    assert layer.plan(40).block is None
    if split is None:
        outs = [jax.jit(layer)(part, params) for part in (x, *jnp.split(x, 5))]
    else:
        outs = [run(layer, params, part) for part in (x, *jnp.split(x, 5))]
    _, magnitude = oracle(layer, x, params)
    few = np.concatenate(outs[1:])
    assert_within_fp32(outs[0], few, magnitude, world_size=layer.world_size)


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


@pytest.mark.parametrize("split", ["tensor 2", "experts 2"])
def test_without_a_shared_expert_and_with_a_sigmoid_router(rng, split):
    layer = split_layer(
        split,
        shared_intermediate=0,
        router="sigmoid",
        num_groups=2,
        topk_groups=1,
        routed_scaling_factor=2.5,
    )
    params, x = make_params(rng, layer, bias=True), make_x(rng, 5)
    out = run(layer, params, x)
    assert_within_fp32(out, *oracle(layer, x, params), world_size=2)


def test_padding_tokens_have_the_shared_experts_output_alone(rng):
    layer = split_layer("experts 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    mask = jnp.array([True, False, True, False])
    out = run(layer, params, x, token_mask=mask)
    whole, magnitude = oracle(layer, x, params)
    off = dataclasses.replace(
        params, experts=dataclasses.replace(params.experts, w2=0 * params.experts.w2)
    )
    shared_alone, _ = oracle(layer, x, off)
    expected = np.where(np.asarray(mask)[:, None], whole, shared_alone)
    assert_within_fp32(out, expected, magnitude, world_size=2)


@pytest.mark.parametrize("split", [None, "tensor 2", "tensor 2 x experts 2"])
def test_add_norm_joins_the_residual_stream_and_normalizes(rng, split):
    layer = make_layer() if split is None else split_layer(split)
    params, x, residual = make_params(rng, layer), make_x(rng, 4), make_x(rng, 4)
    weight = jnp.asarray(rng.uniform(0.5, 2, HIDDEN), jnp.float32)
    prepared = layer.prepare(params)
    if split is None:
        step = jax.jit(lambda *args: layer.add_norm(*args, 1e-6))
        normed, stream = step(x, prepared, residual, weight)
    else:
        with pool_of(layer) as pool:
            step = jax.jit(lambda *args: layer.add_norm(*args, 1e-6, pool=pool))
            normed, stream = jax.block_until_ready(step(x, prepared, residual, weight))
            assert [record.op for record in pool.records()] == ["all_reduce_rms_norm"]
    whole, magnitude = oracle(layer, x, params)
    whole = whole + np.asarray(residual)
    magnitude = magnitude + np.abs(residual)
    assert_within_fp32(stream, whole, magnitude, world_size=layer.world_size)
    expected = whole / np.sqrt(np.mean(whole**2, axis=1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(normed, expected, rtol=0, atol=1e-4)


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


def test_differentiating_the_layer_says_that_it_is_inference_only(rng):
    layer = make_layer()
    params, x = make_params(rng, layer), make_x(rng, 4)
    with pytest.raises(NotImplementedError, match="moe_block is inference-only"):
        jax.jit(jax.grad(lambda x: layer(x, params).sum()))(x)
    many = jnp.tile(x, (20, 1))
    with pytest.raises(NotImplementedError, match="fused_moe is inference-only"):
        jax.jit(jax.grad(lambda x: layer(x, params).sum()))(many)
    split = split_layer("tensor 2")
    prepared = split.prepare(params)
    with (
        pool_of(split) as pool,
        pytest.raises(NotImplementedError, match="moe_block is inference-only"),
    ):
        jax.jit(jax.grad(lambda x: split(x, prepared, pool=pool).sum()))(x)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k is 9; it must be at most num_experts (8)"),
        ({"hidden": 0}, "hidden is 0; it must be 1 or more"),
        ({"router": "best"}, "router is 'best'; it must be 'softmax', 'sigmoid' or a function"),
        ({"overlap": "on"}, "overlap is 'on'; it must be 'auto' or 'off'"),
        ({"tensor_axis": "tp"}, "mesh is None, but the layer is split over the axes ('tp',)"),
        ({"mesh": {"tp": 2}}, "neither tensor_axis nor expert_axis: name one of its axes ('tp',)"),
        ({"mesh": {"tp": 2}, "expert_axis": "ep"}, "'ep' is no axis of the mesh ('tp',)"),
        (
            {"mesh": {"tp": 2}, "expert_axis": "tp", "tensor_axis": "tp"},
            "tensor_axis and expert_axis are both 'tp'",
        ),
        (
            {"mesh": {"tp": 4}, "tensor_axis": "tp", "intermediate": 96},
            "intermediate is 96, which does not split over 4 devices: 96 / 4 must be a multiple of "
            "16, the block of nvfp4",
        ),
        (
            {"mesh": {"ep": 8}, "expert_axis": "ep"},
            "shared_intermediate is 64, which does not split over 8 devices",
        ),
    ],
)
def test_fields_that_do_not_fit_are_named(changes, message):
    if "mesh" in changes:
        changes = {**changes, "mesh": mesh_of(**changes["mesh"])}
    with pytest.raises(ValueError, match=re.escape(message)):
        make_layer(**changes)


def test_arguments_that_are_not_the_layers_are_named(rng):
    layer = split_layer("tensor 2")
    params, x = make_params(rng, layer), make_x(rng, 2)
    prepared = layer.prepare(params)
    with pytest.raises(ValueError, match=re.escape("comm.ChannelPool(mesh, 'tp')")):
        layer(x, prepared)
    with pytest.raises(ValueError, match=r"x has shape \(2, 32\); it must be \[num_tokens, hidd"):
        make_layer()(x[:, :32], params)
    other = split_layer("tensor 2 x experts 2")
    with (
        comm.ChannelPool(other.mesh, "tp") as pool,
        pytest.raises(ValueError, match=r"pool is over the axes \('tp',\); the layer is split o"),
    ):
        other(x, other.prepare(params), pool=pool)
    with pool_of(layer) as pool:
        with pytest.raises(ValueError, match=r"split over \(1, 1\) dev.*layer.prepare\(para"):
            layer(x, params, pool=pool)
        with pytest.raises(ValueError, match="the layer has no mesh and reduces nothing"):
            make_layer()(x, params, pool=pool)
    with pytest.raises(ValueError, match=r"params.shared is None, but shared_intermediate is 64"):
        make_layer()(x, dataclasses.replace(params, shared=None))
    with pytest.raises(ValueError, match="is a DenseExpert; shared_format is 'nvfp4', which need"):
        make_layer(shared_format="nvfp4")(x, params)
    with pytest.raises(ValueError, match=r"params.router.shape is \(4, 64\); the layer needs \(8"):
        make_layer()(x, dataclasses.replace(params, router=params.router[:4]))


def test_a_mesh_of_one_device_gives_what_no_mesh_gives(rng):
    layer = make_layer(mesh=mesh_of(tp=1), tensor_axis="tp")
    params, x = make_params(rng, layer), make_x(rng, 4)
    np.testing.assert_array_equal(run(layer, params, x), jax.jit(make_layer())(x, params))


@pytest.mark.parametrize(
    ("recipe", "environment", "expected"),
    [
        ("nvfp4", "1", ["fork", "shared on aux", "router", "routed", "join", "add"]),
        ("nvfp4", "0", ["fork", "shared on aux", "router", "join", "routed", "add"]),
        ("w4a16", "1", ["fork", "shared on aux", "router", "join", "routed", "add"]),
    ],
)
def test_the_shared_expert_is_submitted_before_the_routed_ones(
    rng, monkeypatch, recipe, environment, expected
):
    monkeypatch.setenv("B12X_NVFP4_SPLIT_DECODE", environment)
    for layer in (make_layer(recipe=recipe), split_layer("tensor 2", recipe=recipe)):
        params, x = make_params(rng, layer), make_x(rng, 4)
        with moe.record_launches() as launches:
            if layer.mesh is None:
                jax.block_until_ready(jax.jit(layer)(x, params))
            else:
                run(layer, params, x)
        assert [launch["steps"] for launch in launches] == [expected] * layer.world_size


def test_workspaces_of_two_lanes_are_apart(rng):
    layer = make_layer()
    params, x = make_params(rng, layer), make_x(rng, 4)
    with workspace.WorkspacePool(lanes=("target", "draft")) as pool, pool.use():
        step = jax.jit(lambda x, p: layer(x, p))
        for name in ("target", "draft"):
            with lane(name):
                jax.block_until_ready(step(x, params))
        records = pool.records()
        assert sorted(record.lane for record in records) == ["draft", "target"]
        with pytest.raises(ValueError, match="the lane is 'default', and workspace pool"):
            step(x, params)
        del step


@pytest.mark.parametrize("num_tokens", [4, 100])
def test_a_shared_expert_of_another_shape_or_dtype_is_refused_for_few_and_many_tokens(
    rng, num_tokens
):
    layer = make_layer()
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    shared, prepared = params.shared, layer.prepare(params)
    for wrong, message in (
        ({"w2": shared.w2[:1]}, r"params.shared: expert.w2 has shape \(1, "),
        ({"w13": shared.w13[: len(shared.w13) // 2]}, "params.shared: expert.w13 has shape"),
        ({"w2_bias": jnp.zeros(1)}, r"params.shared: expert.w2_bias has shape \(1,\)"),
        ({"shared_gate": jnp.zeros(1)}, r"params.shared: expert.shared_gate has shape \(1,\)"),
    ):
        other = dataclasses.replace(shared, **wrong)
        with pytest.raises(ValueError, match=message):
            layer.prepare(dataclasses.replace(params, shared=other))
        with pytest.raises(ValueError, match=message):
            layer(x, dataclasses.replace(prepared, shared=other))
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), shared)
    with pytest.raises(TypeError, match="w13 has dtype bfloat16; it must be float32"):
        layer(x, dataclasses.replace(prepared, shared=narrow))


def test_a_router_of_another_dtype_is_refused_when_it_is_prepared(rng):
    layer = make_layer()
    params = make_params(rng, layer)
    whole = dataclasses.replace(params, router=params.router.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"params.router has dtype int32; it must be"):
        layer.prepare(whole)
    with pytest.raises(ValueError, match=r"params.router_bias is float32\[1\]; it must be"):
        layer.prepare(dataclasses.replace(params, router_bias=jnp.zeros(1)))


def test_on_one_device_add_norm_checks_what_it_checks_on_a_mesh(rng):
    layer = make_layer()
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 3)
    weight = jnp.ones(HIDDEN)
    for residual, norm, eps, message in (
        (weight, x, 1e-6, "residual must have the shape of x"),
        (x[:1], weight, 1e-6, "residual must have the shape of x"),
        (x, weight[:1], 1e-6, "weight must have the shape"),
        (x, weight, -1.0, "eps must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.add_norm(x, params, residual, norm, eps)
    with pytest.raises(TypeError, match="eps must be a number that tracing knows, not None"):
        layer.add_norm(x, params, x, weight, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recipe": "foo"}, "foo"),
        ({"activation": "silu"}, "activation is 'silu'; it must be an Activation"),
        ({"renormalize": "no"}, "renormalize is 'no'; it must be True or False"),
        ({"num_groups": 2}, "num_groups is 2; a softmax router has no groups"),
        ({"router": "sigmoid", "num_groups": 3}, "num_groups is 3; it must divide"),
        ({"router": lambda a, b: a, "routed_scaling_factor": 3.0}, "is a function returns weights"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan; it must be"),
        ({"recipe": "nvfp4", "weight_format": "mxfp4"}, "weight_format is 'mxfp4'; it must be"),
        ({"hidden": 128.0}, "hidden is 128.0; it must be an integer"),
    ],
)
def test_a_field_that_is_out_of_range_is_refused_when_the_layer_is_made(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**fields)


@pytest.mark.parametrize("axes", [{}, {"expert_axis": "ep"}, {"tensor_axis": "tp"}])
@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (lambda ids, weights: (ids[:, :2], weights[:, :2]), r"topk_ids as int32\[4, 2\]"),
        (lambda ids, weights: (ids[0], weights[0]), r"topk_ids as int32\[3\]"),
        (lambda ids, weights: (ids, weights[:, :2]), r"topk_weights as float32\[4, 2\]"),
        (lambda ids, weights: (ids.astype(jnp.float32), weights), r"topk_ids as float32\[4, 3\]"),
        (lambda ids, weights: (ids, None), "topk_weights as no array"),
        (lambda ids, weights: ids, "router returned"),
        (lambda ids, weights: (ids, weights, ids), "router returned tuple"),
    ],
)
def test_what_a_custom_router_returns_is_checked_on_every_mesh_before_it_is_cut(
    rng, axes, routed, said
):
    def router(logits, token_mask):
        return routed(*moe.routing.softmax_topk(logits, 3, token_mask=token_mask))

    mesh = mesh_of(**dict.fromkeys(axes.values(), 2))
    layer = make_layer(router=router, **(axes and {"mesh": mesh, **axes}))
    params, x = make_params(rng, layer), make_x(rng, 4)
    with pytest.raises((TypeError, ValueError), match=f"{said}.*it must return .*topk_ids int32"):
        run(layer, params, x) if axes else jax.jit(layer)(x, params)
