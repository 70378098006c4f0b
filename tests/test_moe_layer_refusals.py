"""What ``MoELayer`` refuses: fields, arguments and parameters that do not fit, by name."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_inputs import (
    HIDDEN,
    make_layer,
    make_params,
    make_x,
    mesh_of,
    pool_of,
    run,
    split_layer,
)

from jax_b12x import comm, moe


@pytest.fixture
def rng():
    return np.random.default_rng(7)


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
    with pytest.raises(TypeError, match=r"params\.shared\.w13 has dtype bfloat16 and x float32"):
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
        ({"routed_scaling_factor": np.float32("inf")}, "routed_scaling_factor is .*inf.*; it must"),
        (
            {"routed_scaling_factor": np.True_},
            "routed_scaling_factor is .*True.*; it must be a fin",
        ),
        (
            {"routed_scaling_factor": np.ones(1)},
            "routed_scaling_factor is .*; it must be .* no arr",
        ),
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


@pytest.mark.parametrize("split", [None, "tensor 2"])
@pytest.mark.parametrize("num_tokens", [4, 80])
def test_differentiating_the_layer_says_that_it_is_inference_only(rng, split, num_tokens):
    layer = make_layer() if split is None else split_layer(split)
    params, x = make_params(rng, layer), make_x(rng, num_tokens)
    prepared, weight = layer.prepare(params), jnp.ones(HIDDEN)
    said = r"MoELayer is inference-only and has no derivative; train with jax_b12x\.flax\.Trainable"
    with contextlib.ExitStack() as stack:
        pool = None if split is None else stack.enter_context(pool_of(layer))

        def of_call(x, router):
            return layer(x, dataclasses.replace(prepared, router=router), pool=pool).sum()

        def of_norm(residual, weight):
            return layer.add_norm(x, prepared, residual, weight, 1e-6, pool=pool)[1].sum()

        for function, arguments in ((of_call, (x, params.router)), (of_norm, (x, weight))):
            for argument in (0, 1):
                gradient = jax.grad(function, argnums=argument)
                for run_it in (gradient, jax.jit(gradient)):
                    with pytest.raises(NotImplementedError, match=said):
                        run_it(*arguments)
        if split is None:
            with pytest.raises(NotImplementedError, match=said):
                jax.grad(lambda x: layer.partial(x, prepared).sum())(x)


def test_a_model_around_the_layer_has_gradients_where_the_layer_has_none(rng):
    layer = make_layer()
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)

    def loss(scale, x):
        y = layer(jax.lax.stop_gradient(scale * x), params)
        return (scale * y).sum()

    y = layer(2 * x, params)
    np.testing.assert_allclose(jax.grad(loss)(2.0, x), y.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "tp", "tensor_axis": "tp"}, "mesh is 'tp', a str; it must be a jax.sharding.Mes"),
        ({"mesh": 2, "tensor_axis": "tp"}, "mesh is an int; it must be a jax.sharding.Mesh"),
        ({"tensor_axis": ("a", "b")}, "tensor_axis is ('a', 'b'); it must be the name of one axis"),
        ({"expert_axis": ["a"]}, "expert_axis is ['a']; it must be the name of one axis of the me"),
        ({"expert_axis": 0}, "expert_axis is 0; it must be the name of one axis of the mesh ('a',"),
    ],
)
def test_a_mesh_or_an_axis_of_another_type_is_named(changes, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_layer(**{"mesh": mesh_of(a=2, b=2), **changes})


def test_an_argument_of_another_type_is_named_with_what_it_is(rng):
    layer = split_layer("tensor 2")
    params, x = make_params(rng, layer), make_x(rng, 4)
    prepared = layer.prepare(params)
    with pool_of(layer) as pool:
        good = {"x": x, "params": prepared, "pool": pool, "token_mask": None}
        for changes, message in (
            ({"x": [[1.0]]}, "x is a list; it must be an array"),
            ({"x": x.astype(jnp.int32)}, "x has dtype int32; it must be float32 or"),
            ({"params": (x, x)}, "params is a tuple; it must be a moe.LayerParams(router, experts"),
            ({"pool": "tp"}, "pool is 'tp', a str; it must be a comm.ChannelPool(mesh, 'tp')"),
            ({"token_mask": [True] * 4}, "token_mask is a list; it must be an array"),
        ):
            with pytest.raises(TypeError, match=re.escape(message)):
                layer(**{**good, **changes})
        with pytest.raises(ValueError, match=re.escape("token_mask is float32[4]; it must be bo")):
            layer(**{**good, "token_mask": jnp.ones(4)})
    alone = make_layer(router=lambda logits, mask: moe.routing.softmax_topk(logits, 3))
    with pytest.raises(ValueError, match=re.escape("token_mask is float32[4]; it must be bool[4]")):
        alone(x, params, token_mask=jnp.ones(4))
    with pytest.raises(TypeError, match="plan is 'fused', a str; it must be a LayerPlan, from lay"):
        alone.partial(x, params, plan="fused")
    with pytest.raises(ValueError, match=r"num_tokens is .few.; it must be an integer: shapes are"):
        alone.plan("few")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": None}, "params.experts is a NoneType; it must be an ExpertWeights"),
        ({"experts": ()}, "params.experts is a tuple; it must be an ExpertWeights"),
        ({"shared": (1, 2)}, "params.shared is a tuple; it must be a DenseExpert, an Exper"),
        ({"router": None}, "params.router is a NoneType; it must be an array"),
        ({"router_bias": [1.0]}, "params.router_bias is a list; it must be an array"),
    ],
)
def test_parameters_of_another_type_are_named(rng, wrong, message):
    layer = make_layer()
    params, x = make_params(rng, layer), make_x(rng, 4)
    wrong_params = dataclasses.replace(params, **wrong)
    uses = [layer.prepare, lambda params: layer(x, params)]
    if "router" not in message:  # specs are made of arrays of any kind
        uses.append(layer.param_specs)
    for use in uses:
        with pytest.raises(TypeError, match=re.escape(message)):
            use(wrong_params)


def test_what_parameters_hold_in_place_of_an_array_is_named(rng):
    layer = make_layer()
    params = make_params(rng, layer)
    experts = dataclasses.replace(params.experts, w2_scale=None)
    with pytest.raises(TypeError, match=re.escape("params.experts.w2_scale is a NoneType; it mu")):
        layer.prepare(dataclasses.replace(params, experts=experts))
    shared = dataclasses.replace(params.shared, w2_bias=[0.0])
    with pytest.raises(TypeError, match=re.escape("expert.w2_bias is a list; it must be an array")):
        layer.prepare(dataclasses.replace(params, shared=shared))


@pytest.mark.parametrize("split", [None, "tensor 2"])
@pytest.mark.parametrize("num_tokens", [4, 100])
def test_a_dense_shared_expert_that_is_converted_goes_with_x(rng, split, num_tokens):
    layer = make_layer() if split is None else split_layer(split)
    params, x = make_params(rng, layer, bias=True), make_x(rng, num_tokens, jnp.bfloat16)
    pool = None if split is None else pool_of(layer)
    with pytest.raises(TypeError, match=re.escape("with params.shared.astype('bfloat16')")):
        layer(x, layer.prepare(params), pool=pool)
    shared = params.shared.astype("bfloat16")
    assert (shared.w13_bias.dtype, shared.shared_gate.dtype) == (jnp.float32, jnp.bfloat16)
    out = layer(x, layer.prepare(dataclasses.replace(params, shared=shared)), pool=pool)
    assert out.dtype == jnp.bfloat16
    if pool is not None:
        pool.close()


@pytest.mark.parametrize("scale", [np.float32(2.5), np.float64(2.5), np.float16(2.5), 2.5])
def test_a_scaling_factor_may_be_a_numpy_scalar(scale):
    layer = make_layer(routed_scaling_factor=scale)
    assert type(layer.routed_scaling_factor) is float
    assert layer == make_layer(routed_scaling_factor=2.5)
    assert make_layer(routed_scaling_factor=np.int32(2)).routed_scaling_factor == 2.0
