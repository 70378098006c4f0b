"""What ``fused_moe`` refuses, and what it makes of values that cannot be checked before it runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_inputs import random_tokens, random_weights

from jax_b12x import _native, config, moe

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K, TOKENS = 64, 32, 4, 2, 6

reference = jax.jit(functools.partial(moe.reference.moe, recipe="nvfp4"))


@pytest.fixture
def case():
    rng = np.random.default_rng()
    weights = random_weights(rng, hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=NUM_EXPERTS)
    x, ids, topk_weights = random_tokens(
        rng,
        num_tokens=TOKENS,
        hidden=HIDDEN,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        dtype=jnp.float32,
    )
    return {"x": x, "weights": weights, "topk_ids": ids, "topk_weights": topk_weights}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda x: x.astype(jnp.int32), TypeError, "x has dtype int32; it must be float32"),
        (
            "x",
            lambda x: x[0],
            ValueError,
            r"x has shape \(64,\); it must be \[num_tokens, hidden\]",
        ),
        ("x", lambda x: x[:, :48], ValueError, r"x has shape \(6, 48\).* weights.hidden = 64"),
        (
            "x",
            lambda x: x[:5],
            ValueError,
            "topk_ids has 6 rows; it must have one for each of the 5",
        ),
        (
            "topk_ids",
            lambda i: i.astype(jnp.uint8),
            TypeError,
            "topk_ids has dtype uint8; it must be int32",
        ),
        (
            "topk_ids",
            lambda i: i[:, 0],
            ValueError,
            r"topk_ids has shape \(6,\); it must be \[num_",
        ),
        (
            "topk_ids",
            lambda i: i[:, :1],
            ValueError,
            r"topk_weights has shape \(6, 2\); it must have the shape of topk_ids, \(6, 1\)",
        ),
        (
            "topk_weights",
            lambda t: t.astype(jnp.bfloat16),
            TypeError,
            "topk_weights has dtype bfloat16; it must be float32",
        ),
        (
            "topk_weights",
            lambda t: t[None],
            ValueError,
            r"topk_weights has shape \(1, 6, 2\); it must be \[num_tokens, top_k\]",
        ),
        ("weights", lambda w: w.w13, TypeError, "weights is a .*; it must be an ExpertWeights"),
        (
            "weights",
            lambda w: dataclasses.replace(w, w2=w.w2[:, :32]),
            ValueError,
            r"weights.w2 has shape \(4, 32, 16\); it must be \(4, 64, 16\)",
        ),
        (
            "weights",
            lambda w: dataclasses.replace(w, w13_scale=w.w13_scale.astype(jnp.float32)),
            TypeError,
            "weights.w13_scale has dtype float32; it must be float8_e4m3fn",
        ),
        (
            "weights",
            lambda w: dataclasses.replace(w, layout="sm90"),
            ValueError,
            "weights.layout is 'sm90', but 'fused' on cpu reads 'checkpoint'; pass the weights as",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(case, name, change, error, message):
    with pytest.raises(error, match=message):
        jax.jit(lambda arguments: moe.fused_moe(**arguments))({**case, name: change(case[name])})


def test_more_routes_than_experts_are_refused(case):
    case["topk_ids"] = jnp.zeros((TOKENS, 5), jnp.int32)
    case["topk_weights"] = jnp.zeros((TOKENS, 5), jnp.float32)
    with pytest.raises(ValueError, match=r"top_k is 5; it must be between 1 and num_experts \(4\)"):
        moe.fused_moe(**case)


def test_unknown_recipe_is_refused(case):
    with pytest.raises(ValueError, match="recipe is 'w4a8'; it must be one of 'w4a16', 'nvfp4'"):
        moe.fused_moe(**case, recipe="w4a8")


def test_plan_for_another_call_is_refused(case):
    plan = moe.plan(
        "w4a16",
        num_tokens=TOKENS + 1,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        dtype=jnp.float32,
    )
    with pytest.raises(ValueError, match="num_tokens is 6, but the plan was made for 7"):
        moe.fused_moe(**case, plan=plan)
    with pytest.raises(ValueError, match="recipe is 'nvfp4', but the plan was made for 'w4a16'"):
        moe.fused_moe(**case, plan=plan, recipe="nvfp4")


def test_instruction_set_that_is_not_one_is_refused(case, monkeypatch):
    monkeypatch.setenv("B12X_HOST_ISA", "avx1024")
    with pytest.raises(config.ConfigError, match=r"B12X_HOST_ISA='avx1024'.*baseline, avx2 or"):
        moe.fused_moe(**case)


def test_instruction_set_that_the_processor_lacks_is_refused(case, monkeypatch):
    monkeypatch.setenv("B12X_HOST_ISA", "avx512")
    monkeypatch.setattr(_native.host(), "host_isas", lambda: ["baseline"])
    with pytest.raises(config.ConfigError, match=r"'avx512' cannot run.*, which has baseline"):
        moe.fused_moe(**case)


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("implementation", ["fused", "split", "dynamic", "reference"])
def test_ids_outside_the_experts_contribute_nothing_even_with_nan_weights(
    case, recipe, implementation
):
    plan = moe.plan(
        recipe,
        num_tokens=TOKENS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        dtype=jnp.float32,
        implementation=implementation,
    )
    call = jax.jit(functools.partial(moe.fused_moe, plan=plan))
    padded = (
        case["topk_ids"]
        .at[:, 1]
        .set(jnp.asarray([-1, NUM_EXPERTS, 2**31 - 1, -(2**31), 1000, -7], jnp.int32))
    )
    with_nan = {
        **case,
        "topk_ids": padded,
        "topk_weights": case["topk_weights"].at[:, 1].set(jnp.nan),
    }
    with_zero = {**case, "topk_weights": case["topk_weights"].at[:, 1].set(0)}
    np.testing.assert_array_equal(call(**with_nan), call(**with_zero))

    nothing = {**with_nan, "topk_ids": jnp.full((TOKENS, TOP_K), -1, jnp.int32)}
    np.testing.assert_array_equal(call(**nothing), np.zeros((TOKENS, HIDDEN), np.float32))


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_nan_stays_in_its_token(case, recipe, dtype):
    case["x"] = case["x"].astype(dtype)
    clean = np.asarray(moe.fused_moe(**case, recipe=recipe), np.float32)
    case["x"] = case["x"].at[2, 5].set(jnp.nan)
    out = np.asarray(moe.fused_moe(**case, recipe=recipe), np.float32)
    assert np.isnan(out[2]).all()
    others = np.arange(TOKENS) != 2
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
def test_an_infinity_stays_in_its_token_and_saturates_in_nvfp4(case, recipe):
    clean = np.asarray(moe.fused_moe(**case, recipe=recipe))
    case["x"] = case["x"].at[3, 7].set(jnp.inf)
    out = np.asarray(moe.fused_moe(**case, recipe=recipe))
    others = np.arange(TOKENS) != 3
    np.testing.assert_array_equal(out[others], clean[others])
    assert np.isfinite(out[3]).all() == (recipe == "nvfp4")


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
def test_an_unusable_input_scale_means_zeros_as_in_the_oracle(case, name, bad):
    scale = jnp.full_like(getattr(case["weights"], name), bad)
    case["weights"] = dataclasses.replace(case["weights"], **{name: scale})
    out = moe.fused_moe(**case, recipe="nvfp4")
    np.testing.assert_array_equal(out, np.zeros((TOKENS, HIDDEN), np.float32))
    np.testing.assert_array_equal(reference(**case), out)


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_bad_weight_scale_touches_only_the_tokens_of_its_expert(case, recipe, bad):
    clean = np.asarray(moe.fused_moe(**case, recipe=recipe))
    scale = case["weights"].w2_global_scale.at[1].set(bad)
    case["weights"] = dataclasses.replace(case["weights"], w2_global_scale=scale)
    out = np.asarray(moe.fused_moe(**case, recipe=recipe))
    hit = (np.asarray(case["topk_ids"]) == 1).any(axis=1)
    np.testing.assert_array_equal(out[~hit], clean[~hit])
    assert not np.isfinite(out[hit]).any()


def test_a_zero_weight_scale_makes_an_expert_silent(case):
    scale = jnp.zeros_like(case["weights"].w2_global_scale)
    case["weights"] = dataclasses.replace(case["weights"], w2_global_scale=scale)
    np.testing.assert_array_equal(moe.fused_moe(**case), np.zeros((TOKENS, HIDDEN), np.float32))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation", "silu", "activation is 'silu'; it must be an Activation"),
        ("plan", "fused", "plan is 'fused'; it must be a MoePlan"),
        ("x", [[1.0, 2.0]], "x is a list; it must be an array"),
        ("topk_ids", None, "topk_ids is a NoneType; it must be an array"),
    ],
)
def test_an_argument_of_another_type_is_named(case, name, value, message):
    with pytest.raises(TypeError, match=message):
        moe.fused_moe(**{**case, name: value})


def test_symbolic_shapes_are_refused(case):
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, HIDDEN), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows, TOP_K), jnp.int32)
    routes = jax.ShapeDtypeStruct((rows, TOP_K), jnp.float32)
    call = jax.jit(lambda x, ids, routes: moe.fused_moe(x, case["weights"], ids, routes))
    with pytest.raises(ValueError, match="num_tokens is rows; it must be an integer"):
        jax.export.export(call)(x, ids, routes)


def test_the_op_may_stand_beside_what_is_differentiated(case):
    def loss(scale):
        x = jax.lax.stop_gradient(case["x"] * scale)
        return scale * moe.fused_moe(**{**case, "x": x}).sum()

    value, gradient = jax.value_and_grad(loss)(jnp.float32(1))
    np.testing.assert_allclose(gradient, value)
