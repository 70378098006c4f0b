"""The Flax module of a layer that serves: made of a trained block, the same on a mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_b12x import comm, moe
from jax_b12x.flax import MoE, MoELayer, PackedExperts, SwiGLU, TrainableExperts

HIDDEN, INTERMEDIATE = 32, 32


def make_block(recipe="nvfp4", *, shared=True, dtype=jnp.float32):
    rngs = nnx.Rngs(0)
    draw = np.random.default_rng(0).standard_normal
    weights = moe.ExpertWeights.quantize(
        *(draw((4, INTERMEDIATE, HIDDEN), np.float32) / 6 for _ in range(3))
    )
    return MoE(
        HIDDEN,
        4,
        2,
        experts=PackedExperts(weights, recipe=recipe),
        shared=SwiGLU(HIDDEN, INTERMEDIATE, dtype=dtype, rngs=rngs) if shared else None,
        rngs=rngs,
    )


def make_x(num_tokens=5):
    return jnp.asarray(np.random.default_rng(1).standard_normal((num_tokens, HIDDEN)), jnp.float32)


@pytest.mark.parametrize("recipe", ["nvfp4", "w4a16"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_layer_gives_what_its_block_gives(recipe, shared):
    block = make_block(recipe, shared=shared)
    x, valid = make_x(), jnp.arange(5) < 4
    expected, _ = nnx.jit(block)(x, valid)
    out = nnx.jit(MoELayer.of(block))(x, valid)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_split_over_a_mesh_it_gives_the_same(monkeypatch):
    block, x = make_block(), make_x()
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    with comm.ChannelPool(mesh, "tp") as pool:
        layer = MoELayer.of(block, mesh=mesh, tensor_axis="tp", pool=pool)
        graph, state = nnx.split(layer)
        step = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        out = np.asarray(step(state, x))
        weight = jnp.ones(HIDDEN)
        normed, stream = jax.jit(
            lambda state, x: nnx.merge(graph, state).add_norm(x, x, weight, 1e-6)
        )(state, x)
        assert {record.op for record in pool.records()} == {"all_reduce", "all_reduce_rms_norm"}
        np.testing.assert_allclose(stream, out + x, rtol=0, atol=1e-6)
        scale = np.sqrt(np.mean(np.square(stream), axis=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(normed, stream / scale, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out, MoELayer.of(block)(x), rtol=0, atol=1e-5)


def test_a_packed_shared_expert_is_joined_to_the_routed_ones():
    block, x = make_block(shared=False), make_x()
    experts = block.experts.weights.get_value()
    draw = np.random.default_rng(5).standard_normal
    shared = moe.ExpertWeights.quantize(
        *(draw((1, INTERMEDIATE, HIDDEN), np.float32) / 6 for _ in range(3))
    )
    layer = moe.MoELayer(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=4,
        top_k=2,
        shared_intermediate=INTERMEDIATE,
        shared_format="nvfp4",
    )
    router = jnp.asarray(block.router.kernel[...].T)
    module = MoELayer(layer, moe.LayerParams(router, experts, shared))
    assert module.params.get_value().joined == 1
    routed, _ = nnx.jit(block)(x, None)
    ids, ones = jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1), jnp.float32)
    expected = routed + moe.reference.moe(x, shared, ids, ones, recipe="nvfp4")
    np.testing.assert_allclose(nnx.jit(module)(x), expected, rtol=0, atol=1e-5)


def test_a_block_that_is_trained_is_refused():
    rngs = nnx.Rngs(0)
    block = MoE(
        HIDDEN, 4, 2, experts=TrainableExperts(4, HIDDEN, INTERMEDIATE, rngs=rngs), rngs=rngs
    )
    with pytest.raises(TypeError, match="experts are TrainableExperts; a layer that serves needs"):
        MoELayer.of(block)


@pytest.mark.parametrize("products", [None, jnp.float32, jnp.bfloat16])
def test_a_block_with_kernels_in_float32_serves_in_another_dtype(products):
    block, x = make_block(dtype=products), make_x().astype(jnp.bfloat16)
    if products != jnp.bfloat16:
        with pytest.raises(TypeError, match=re.escape("MoELayer.of(block, dtype='bfloat16')")):
            MoELayer.of(block)(x)
    layer = MoELayer.of(block, dtype="bfloat16")
    out = nnx.jit(layer)(x)
    assert out.dtype == jnp.bfloat16
    expected = np.asarray(nnx.jit(block)(x, None)[0], np.float32)
    # A few roundings to bfloat16 of values up to the largest one.
    atol = 4 * 2.0**-8 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=0, atol=atol)


def test_an_argument_of_another_type_is_named():
    block = make_block()
    with pytest.raises(TypeError, match=r"block is a NoneType; it must be a jax_b12x.flax.MoE"):
        MoELayer.of(None)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    with pytest.raises(TypeError, match=r"pool is 'tp', a str; it must be a comm\.ChannelPool"):
        MoELayer.of(block, mesh=mesh, tensor_axis="tp", pool="tp")
    layer = MoELayer.of(block)
    with pytest.raises(TypeError, match=r"layer is a State; it must be a moe\.MoELayer"):
        MoELayer(nnx.state(layer), layer.params.get_value())


def test_a_module_that_serves_has_nothing_to_train():
    layer, x = MoELayer.of(make_block()), make_x()
    assert not jax.tree.leaves(nnx.grad(lambda layer: layer(x).sum())(layer))
    with pytest.raises(NotImplementedError, match="MoELayer is inference-only"):
        jax.grad(lambda x: layer(x).sum())(x)


def test_its_programs_bear_its_name():
    layer = MoELayer.of(make_block())
    assert "module @jit_moe_layer " in nnx.jit(layer).lower(make_x()).lowered.as_text()
