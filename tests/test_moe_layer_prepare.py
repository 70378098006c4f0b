"""``MoELayer.prepare``: under jit, with donation, and of parameters that were prepared before."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_inputs import make_layer, make_params, make_x, run, split_layer

from jax_b12x import capability

H200 = capability.KNOWN["h200"]
PACKED = ("w13", "w13_scale", "w2", "w2_scale")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def joined_layer(**changes):
    return make_layer(shared_format="nvfp4", shared_intermediate=128, **changes)


def for_gpu(layer, params):
    """Returns parameters as a GPU has them."""
    made = layer.plan(1, device=H200, joined=bool(params.joined))
    return dataclasses.replace(params, experts=params.experts.prepare(made.routed))


def test_under_jit_on_one_device_it_gives_what_it_gives_outside(rng):
    layer = joined_layer(recipe="w4a16")
    params = make_params(rng, layer)
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(layer.prepare)(params), layer.prepare(params)
    )


def test_under_jit_on_a_mesh_and_with_donation_it_says_to_call_it_outside(rng):
    layer, alone = split_layer("tensor 2"), make_layer()
    params = make_params(rng, layer)
    with pytest.raises(
        TypeError, match=r"params\.router is traced, but on a mesh .* outside jax\.jit"
    ):
        jax.jit(layer.prepare)(params)
    with pytest.raises(TypeError, match=r"params\.router is traced and donate is True"):
        jax.jit(functools.partial(alone.prepare, donate=True))(params)


@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
def test_parameters_that_are_split_already_are_refused_with_what_to_do(rng, shared_format):
    fields = {"recipe": "w4a16", "shared_format": shared_format, "shared_intermediate": 128}
    layer, other = (split_layer(split, **fields) for split in ("tensor 2", "experts 2"))
    prepared = layer.prepare(make_params(rng, layer))
    assert bool(prepared.joined) == (shared_format == "nvfp4")
    with pytest.raises(
        ValueError, match=r"split over \(1, 2\) .* already; call the layer with them"
    ):
        layer.prepare(prepared)
    for wrong in (other, make_layer()):
        with pytest.raises(ValueError, match=r"split over \(1, 2\) .* already; .*load them again"):
            wrong.prepare(prepared)


@pytest.mark.parametrize("split", [None, "tensor 2"])
@pytest.mark.parametrize("shared_format", ["dense", "nvfp4"])
def test_parameters_in_the_layout_of_a_device_may_be_prepared_again(rng, split, shared_format):
    alone = make_layer(shared_format=shared_format, shared_intermediate=128)
    params, x = make_params(rng, alone), make_x(rng, 4)
    prepared = for_gpu(alone, alone.prepare(params))
    assert prepared.experts.layout == "sm90"
    if split is None:
        again = alone.prepare(prepared)
        jax.tree.map(np.testing.assert_array_equal, again, alone.prepare(params))
        return
    layer = split_layer(split, shared_format=shared_format, shared_intermediate=128)
    np.testing.assert_array_equal(run(layer, prepared, x), run(layer, params, x))


def test_parameters_that_are_joined_already_are_returned_as_they_are(rng):
    layer = joined_layer()
    prepared = layer.prepare(make_params(rng, layer))
    for again in (layer.prepare(prepared), layer.prepare(prepared, donate=True)):
        pairs = zip(jax.tree.leaves(again), jax.tree.leaves(prepared), strict=True)
        assert all(one is other for one, other in pairs)


@pytest.mark.parametrize("gpu", [False, True])
def test_what_was_joined_before_is_freed_where_it_is_donated_and_copied(rng, gpu):
    layer = joined_layer()
    params = make_params(rng, layer)
    apart = dataclasses.replace(layer, overlap="off")
    prepared = layer.prepare(params)
    if gpu:
        prepared = for_gpu(layer, prepared)
    again = apart.prepare(prepared, donate=True)
    assert all(getattr(prepared.experts, name).is_deleted() for name in PACKED)
    jax.tree.map(np.testing.assert_array_equal, again, apart.prepare(params))


def test_what_was_in_the_layout_of_another_device_is_freed_where_it_is_donated(rng):
    layer = make_layer()
    params = make_params(rng, layer)
    prepared = for_gpu(layer, params)
    again = layer.prepare(prepared, donate=True)
    assert all(getattr(prepared.experts, name).is_deleted() for name in PACKED)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_joined_parameters_come_apart_for_a_recipe_that_cannot_have_them_joined(rng):
    layer = joined_layer(recipe="w4a16")
    params = make_params(rng, layer)
    scale = 2 * params.shared.w13_input_scale
    params = dataclasses.replace(
        params, shared=dataclasses.replace(params.shared, w13_input_scale=jnp.asarray(scale))
    )
    prepared = layer.prepare(params)
    assert prepared.joined
    quantized = dataclasses.replace(layer, recipe="nvfp4")
    again = quantized.prepare(prepared)
    jax.tree.map(np.testing.assert_array_equal, again, params)
