"""``MoELayer`` on GPUs: every way to launch it, eager and captured, and split over two.

Tolerances are relative Frobenius errors, as in ``test_moe_cuda.py``, whose reasons hold here: what
the shared expert and the second rank add is rounded once more, to 2^-9 of an element in bf16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from layer_inputs import make_layer, make_params, mesh_of, oracle

from jax_b12x import comm, lane, moe

TOLERANCE = {"w4a16": 7e-3, "nvfp4": 1.5e-2}
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}
EAGER = {"xla_gpu_graph_min_graph_size": 1 << 30}
P = PartitionSpec


def make(recipe, shared_format, **changes):
    fields = {
        "hidden": 1024,
        "intermediate": 512,
        "shared_intermediate": 512,
        "num_experts": 16,
        "top_k": 4,
    }
    return make_layer(recipe=recipe, shared_format=shared_format, **{**fields, **changes})


def draw(layer, num_tokens):
    rng = np.random.default_rng(num_tokens)
    params = make_params(rng, layer, bias=True, dtype=jnp.bfloat16)
    return params, jnp.asarray(rng.normal(size=(num_tokens, layer.hidden)), jnp.bfloat16)


def run(step, *arguments, options=EAGER, times=1):
    compiled = jax.jit(step).lower(*arguments).compile(compiler_options=options)
    results = []
    for _ in range(times):
        results.append(np.asarray(jax.block_until_ready(compiled(*arguments)), np.float64))
    return results


def on_the_cpu(layer, x, params):
    """Returns what the oracle says, without its programs being tuned for the GPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return oracle(layer, *jax.device_put((x, params), cpu))[0]


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_every_launch_and_every_order_gives_the_same_bits(recipe, shared_format, num_tokens):
    layer = make(recipe, shared_format)
    params, x = draw(layer, num_tokens)
    # The shared expert apart: joined to the routed ones it is rounded with them.
    prepared = dataclasses.replace(layer, overlap="off").prepare(params)
    outs = []
    for overlap in ("auto", "off"):
        of = dataclasses.replace(layer, overlap=overlap)
        for implementation in ("fused", "split"):
            plan = of.plan(num_tokens, implementation=implementation, joined=False)
            for options in (EAGER, CAPTURED):

                def step(x, p, of=of, plan=plan):
                    return of.partial(x, p, plan=plan)

                outs += run(step, x, prepared, options=options, times=3)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    expected = on_the_cpu(layer, x, params)
    assert relative_error(outs[0], expected) < TOLERANCE[recipe]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 1), (4, 2), (7, 1), (8, 2), (8, 1)])
def test_a_joined_expert_fused_and_split_eager_and_captured_has_the_same_bits(
    recipe, num_tokens, count
):
    layer = make(recipe, "nvfp4", shared_intermediate=count * 512)
    params, x = draw(layer, num_tokens)
    prepared = layer.prepare(params)
    assert prepared.joined == count
    plans = [layer.plan(num_tokens, implementation=launch) for launch in ("fused", "split")]
    assert {plan.order for plan in plans} == {"joined"}

    def step(x, p):
        return [layer.partial(x, p, plan=plan) for plan in plans]

    lowered = jax.jit(step).lower(x, prepared)
    captured, eager = (lowered.compile(compiler_options=o) for o in (CAPTURED, EAGER))
    rng = np.random.default_rng(count)
    for turn in range(100):
        x = jnp.asarray(rng.normal(size=x.shape), x.dtype)
        fused, split = (np.asarray(out).view(np.uint16) for out in captured(x, prepared))
        np.testing.assert_array_equal(fused, split)
        for out in eager(x, prepared):
            np.testing.assert_array_equal(np.asarray(out).view(np.uint16), fused)
        if turn == 0:
            expected = on_the_cpu(layer, x, params)
            actual = np.asarray(fused.view(jnp.bfloat16), np.float64)
            assert relative_error(actual, expected) < TOLERANCE[recipe]
            apart = dataclasses.replace(layer, overlap="off")
            (serial,) = run(apart.partial, x, apart.prepare(params))
            # Two roundings more, of 2^-9 of an element each on average.
            assert relative_error(actual, serial) < 2 * 2.0**-8
    with moe.record_launches() as launches:
        jax.block_until_ready(eager(x, prepared))
    assert [launch["steps"] for launch in launches] == [["router", "routed"]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
def test_many_tokens_and_a_custom_router_agree_with_the_oracle(shared_format):
    def router(logits, token_mask):
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits), 4)
        return ids.astype(jnp.int32), weights

    for layer in (make("w4a16", shared_format), make("w4a16", shared_format, router=router)):
        for num_tokens in (3, 100):
            params, x = draw(layer, num_tokens)
            (out,) = run(layer, x, layer.prepare(params))
            expected = on_the_cpu(layer, x, params)
            assert relative_error(out, expected) < TOLERANCE["w4a16"]


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4"])
@pytest.mark.parametrize("axis", ["tensor_axis", "expert_axis"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
def test_split_over_two_gpus_the_layer_agrees_with_the_oracle(recipe, axis, shared_format):
    layer = make(recipe, shared_format, mesh=mesh_of(ranks=2), **{axis: "ranks"})
    with comm.ChannelPool(layer.mesh, "ranks", timeout=5) as pool:
        for num_tokens in (1, 8) if recipe == "nvfp4" else (3, 100):
            params, x = draw(layer, num_tokens)
            prepared = layer.prepare(params)

            def step(x, p):
                return layer(x, p, pool=pool)

            outs = [
                out
                for options in (EAGER, CAPTURED)
                for out in run(step, x, prepared, options=options, times=3)
            ]
            pool.check()
            for out in outs[1:]:
                np.testing.assert_array_equal(out, outs[0])
            expected = on_the_cpu(layer, x, params)
            assert relative_error(outs[0], expected) < TOLERANCE[recipe]


@pytest.mark.multigpu
def test_two_gpus_hold_the_same_bits_and_so_do_two_lanes_that_run_around_each_other():
    layer = make("nvfp4", "dense", mesh=mesh_of(tp=2), tensor_axis="tp")
    params, x = draw(layer, 4)
    prepared = layer.prepare(params)
    with comm.ChannelPool(layer.mesh, "tp", timeout=5) as pool:

        def body(x, p):
            for _ in range(3):
                x = layer(x, p, pool=pool)
            return x

        specs = (P(), layer.param_specs(prepared))
        step = jax.shard_map(body, mesh=layer.mesh, in_specs=specs, out_specs=P())
        programs = {}
        for name in ("target", "draft"):
            with lane(name):
                programs[name] = jax.jit(step).lower(x, prepared).compile(compiler_options=CAPTURED)
        expected = None
        for turn in range(50):
            out = programs["target" if turn % 3 else "draft"](x, prepared)
            for shard in out.addressable_shards:
                got = np.asarray(shard.data)
                expected = got if expected is None else expected
                np.testing.assert_array_equal(got, expected)
        pool.check()
