"""Arguments of another kind: each public function refuses them by name, before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_inputs import random_tokens, random_weights

from jax_b12x import comm, moe, quant, workspace
from jax_b12x.moe import reference, routing

SIZES = {"hidden": 64, "intermediate": 32, "num_experts": 4}
RNG = np.random.default_rng(0)
WEIGHTS = random_weights(RNG, **SIZES)
X, IDS, ROUTES = random_tokens(
    RNG, num_tokens=3, hidden=64, num_experts=4, top_k=2, dtype=jnp.bfloat16
)
ROUTER = jnp.ones((4, 64), jnp.bfloat16)
LOGITS = jnp.ones((3, 4))
DENSE = moe.DenseExpert(jnp.ones((64, 64), X.dtype), jnp.ones((64, 32), X.dtype))
LAYER = moe.MoELayer(**SIZES, top_k=2)
MATRIX = np.ones((4, 32, 64), np.float32)


def plan(**changes):
    facts = {"recipe": "w4a16", "num_tokens": 3, "top_k": 2, "dtype": X.dtype, **SIZES}
    return moe.plan(**{**facts, **changes})


def block(**changes):
    facts = {"x": X, "routed": WEIGHTS, "topk": (IDS, ROUTES)}
    return moe.moe_block(**{**facts, "plan": moe.plan_block(plan(), router=False), **changes})


def packed(module):
    return module.quantize(jnp.ones((2, 32)))


ROUTE = {"x": X, "weight": ROUTER, "top_k": 2}
FORMATS = {
    module.__name__.rpartition(".")[2]: module
    for module in (quant.nvfp4, quant.mxfp4, quant.mxfp8, quant.nf3)
}
MOE = {"x": X, "weights": WEIGHTS, "topk_ids": IDS, "topk_weights": ROUTES}
QUANTIZE = {"w_gate": MATRIX, "w_up": MATRIX, "w_down": MATRIX.transpose(0, 2, 1)}
ARRAYS = {name: getattr(WEIGHTS, name) for name in ("w13", "w13_scale", "w2", "w2_scale")}
SCALES = ("w13_input_scale", "w2_input_scale")
NORM = {"summed": X, "residual": X, "weight": X[0], "eps": 1e-6}

# What is called, with what, and which of the arguments are then replaced one at a time.
CALLS = {
    "plan": (plan, {}, ("dtype", "num_tokens", "top_k", "activation")),
    "layer.plan": (LAYER.plan, {"num_tokens": 3}, ("num_tokens", "dtype")),
    "layer.explain": (LAYER.explain, {"num_tokens": 3}, ("num_tokens", "dtype")),
    "layer.prepare": (LAYER.prepare, {}, ("params",)),
    "layer.param_specs": (LAYER.param_specs, {}, ("params",)),
    "layer": (LAYER.__call__, {"x": X}, ("params",)),
    "prepare": (WEIGHTS.prepare, {}, ("plan",)),
    "quantize": (moe.ExpertWeights.quantize, QUANTIZE, (*QUANTIZE, *SCALES)),
    "from_arrays": (
        moe.ExpertWeights.from_arrays,
        ARRAYS,
        (*ARRAYS, "w13_global_scale", "w2_global_scale", *SCALES),
    ),
    "fused_moe": (moe.fused_moe, MOE, tuple(MOE)),
    "moe_block": (block, {}, ("x", "routed", "plan")),
    "reference.moe": (reference.moe, MOE, (*MOE, "activation")),
    "dense_mlp": (moe.dense_mlp, {"x": X, "expert": DENSE}, ("x", "expert", "activation")),
    "reference.dense_mlp": (
        reference.dense_mlp,
        {"x": X, "expert": DENSE},
        ("x", "expert", "activation"),
    ),
    "DenseExpert.astype": (DENSE.astype, {}, ("dtype",)),
    "DensePlan": (moe.DensePlan, {"intermediate": 32}, ("intermediate", "activation")),
    "Activation": (moe.Activation, {}, ("kind", "alpha", "limit")),
    "softmax_topk": (routing.softmax_topk, {"logits": LOGITS, "top_k": 2}, ("logits", "top_k")),
    "sigmoid_topk": (
        routing.sigmoid_topk,
        {"logits": LOGITS, "top_k": 2},
        ("logits", "top_k", "num_groups", "topk_groups", "routed_scaling_factor"),
    ),
    "route": (
        routing.route,
        ROUTE,
        (*ROUTE, "scoring", "renormalize", "scale", "num_groups", "topk_groups", "num_joined"),
    ),
    "route_reference": (
        routing.route_reference,
        ROUTE,
        (*ROUTE, "scoring", "scale", "num_joined"),
    ),
    "with_joined": (
        routing.with_joined,
        {"topk_ids": IDS, "topk_weights": ROUTES, "first": 4, "count": 1},
        ("topk_ids", "topk_weights", "first", "count"),
    ),
    "add_rms_norm": (comm.add_rms_norm, NORM, tuple(NORM)),
    "channel_bytes": (
        comm.channel_bytes,
        {"message_bytes": 1, "world_size": 2},
        ("message_bytes", "world_size"),
    ),
    "required_bytes": (
        comm.required_bytes,
        {"programs": [[1]], "world_size": 2, "isolation": "lane"},
        ("programs", "world_size", "isolation"),
    ),
    "nvfp4.global_scale": (quant.nvfp4.global_scale, {}, ("amax",)),
    **{
        f"{name}.quantize": (
            module.quantize,
            {"x": jnp.ones((2, 32))},
            ("x", "global_scale") if name in ("nvfp4", "nf3") else ("x",),
        )
        for name, module in FORMATS.items()
    },
    **{
        f"{name}.dequantize": (module.dequantize, {"q": packed(module)}, ("q", "dtype"))
        for name, module in FORMATS.items()
    },
}


@pytest.mark.parametrize("value", [None, "text", object()], ids=["none", "text", "object"])
@pytest.mark.parametrize(
    ("call", "name"),
    [pytest.param(call, name, id=f"{call}-{name}") for call in CALLS for name in CALLS[call][2]],
)
def test_an_argument_of_another_kind_is_named(call, name, value):
    function, arguments, _ = CALLS[call]
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        function(**{**arguments, name: value})


@pytest.mark.parametrize("value", ["text", object(), 3.5], ids=["text", "object", "number"])
def test_an_optional_argument_of_another_kind_is_named(value):
    with pytest.raises(TypeError, match="correction_bias is "):
        routing.sigmoid_topk(LOGITS, 2, correction_bias=value)
    with pytest.raises(TypeError, match="bias is "):
        routing.route_reference(X, ROUTER, value, top_k=2)
    with pytest.raises(TypeError, match=r"topk is .*; it must be \(topk_ids, topk_weights\)"):
        block(topk=value)
    with pytest.raises(ValueError, match="lanes must be names"):
        workspace.WorkspacePool(lanes=value)


def test_messages_say_what_it_was_and_what_would_be_right():
    with pytest.raises(TypeError, match=r"params is a NoneType; it must be a moe\.LayerParams\("):
        LAYER.prepare(None)
    with pytest.raises(TypeError, match="plan is 'fused', a str; it must be a MoePlan, from jax_"):
        WEIGHTS.prepare("fused")
    with pytest.raises(TypeError, match=r"dtype is None; it must be a dtype, such as jnp\.bfloat"):
        plan(dtype=None)
    with pytest.raises(TypeError, match="w_up is a NoneType; it must be an array or a number"):
        moe.ExpertWeights.quantize(**{**QUANTIZE, "w_up": None})
    with pytest.raises(TypeError, match="routed is a NoneType; it must be an ExpertWeights"):
        block(routed=None)


@pytest.mark.parametrize(
    ("experts", "intermediate", "hidden", "message"),
    [
        (0, 32, 64, r"w_gate has shape \(0, 32, 64\); there must be 1 expert or more"),
        (4, 0, 64, r"intermediate is 0, from w_gate's \(4, 0, 64\); nvfp4 needs a positive mult"),
        (4, 32, 0, r"hidden is 0, from w_gate's \(4, 32, 0\); nvfp4 needs a positive multiple"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_weights_of_nothing_are_refused(experts, intermediate, hidden, message, wrap):
    gate = jnp.zeros((experts, intermediate, hidden))
    with pytest.raises(ValueError, match=message):
        wrap(moe.ExpertWeights.quantize)(gate, gate, gate.transpose(0, 2, 1))


def test_packed_arrays_of_nothing_are_refused():
    none = {name: array[:0] for name, array in ARRAYS.items()}
    with pytest.raises(ValueError, match=r"w13 has shape \(0, 64, 32\); there must be 1 expert or"):
        moe.ExpertWeights.from_arrays(**none)
