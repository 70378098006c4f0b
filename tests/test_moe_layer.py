"""``MoELayer`` on one device and split: the sum of its parts, for few tokens and for many."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_inputs import (
    HIDDEN,
    assert_within_fp32,
    make_layer,
    make_params,
    make_x,
    oracle,
    pool_of,
    run,
    split_layer,
)

from jax_b12x import lane, moe, workspace


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_on_one_device_the_layer_is_the_sum_of_its_parts(rng, recipe, shared_format, num_tokens):
    layer = make_layer(recipe=recipe, shared_format=shared_format)
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    out = jax.jit(layer)(x, layer.prepare(params))
    assert_within_fp32(out, *oracle(layer, x, params), world_size=1)


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


def test_programs_and_records_of_a_layer_bear_its_name(rng):
    layer, split = make_layer(), split_layer("tensor 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    assert "module @jit_moe_layer " in jax.jit(layer).lower(x, params).as_text()
    with pool_of(split) as pool:
        step = jax.jit(functools.partial(split, pool=pool))
        step(x, split.prepare(params)).block_until_ready()
        assert [record.program for record in pool.records()] == ["jit_moe_layer"]
