"""Where ``MoELayer`` is called: on meshes of any kind of axes, inside ``shard_map`` or not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layer_inputs import HIDDEN, make_layer, make_params, make_x, mesh_of, pool_of, run

P = PartitionSpec
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def data_and_tensor(axis_type, **fields):
    """A layer whose columns are split over one axis of a mesh of two."""
    types = (axis_type,) * 2
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=types, devices=jax.devices()[:4])
    return make_layer(mesh=mesh, tensor_axis="tp", **fields)


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
@pytest.mark.parametrize("with_norm", [False, True])
def test_inside_a_shard_map_over_other_axes_the_layer_maps_itself_over_its_own(
    rng, axis_type, with_norm
):
    layer = data_and_tensor(axis_type)
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    weight = jnp.ones(HIDDEN)
    with pool_of(layer) as pool:

        def step(x, params):
            if with_norm:
                return layer.add_norm(x, params, x, weight, 1e-6, pool=pool)
            return layer(x, params, pool=pool)

        expected = jax.jit(step)(x, params)
        split = jax.device_put(x, NamedSharding(layer.mesh, P("dp")))
        over_data = jax.shard_map(
            step,
            mesh=layer.mesh,
            in_specs=(P("dp"), P()),
            out_specs=P("dp"),
            axis_names={"dp"},
        )
        out = jax.jit(over_data)(split, params)
    jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.parametrize("place", [None, P(), P("dp"), P("tp"), P(None, "tp")])
def test_on_a_mesh_of_auto_axes_x_may_lie_anyhow(rng, place):
    layer = data_and_tensor(AxisType.Auto)
    params, x = make_params(rng, layer), make_x(rng, 4)
    placed = x if place is None else jax.device_put(x, NamedSharding(layer.mesh, place))
    np.testing.assert_array_equal(run(layer, params, placed), run(layer, params, x))


@pytest.mark.parametrize("place", [P("dp"), P("tp"), P(None, "tp")])
def test_on_a_mesh_of_explicit_axes_an_argument_that_is_sharded_is_named(rng, place):
    layer = data_and_tensor(AxisType.Explicit)
    prepared, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    same = jax.device_put(x, NamedSharding(layer.mesh, P()))
    split = jax.device_put(x, NamedSharding(layer.mesh, place))
    mask = jax.device_put(jnp.ones(4, bool), NamedSharding(layer.mesh, P("tp")))
    replicated = jax.device_put(prepared, NamedSharding(layer.mesh, P()))
    weight = jnp.ones(HIDDEN)
    with pool_of(layer) as pool:

        def step(x, params, token_mask=None):
            return layer(x, params, pool=pool, token_mask=token_mask)

        def with_norm(x, params, residual):
            return layer.add_norm(x, params, residual, weight, 1e-6, pool=pool)

        expected = jax.jit(step)(x, prepared)
        np.testing.assert_array_equal(jax.jit(step)(same, prepared), expected)
        for jit in (jax.jit, lambda function: function):
            for name, function, arguments in (
                ("x", step, (split, prepared)),
                ("token_mask", step, (same, prepared, mask)),
                ("residual", with_norm, (same, prepared, split)),
            ):
                with pytest.raises(
                    ValueError, match=rf"{name} is sharded as P\(.*jax\.reshard\({name},"
                ):
                    jit(function)(*arguments)
            with pytest.raises(ValueError, match=r"params\.experts\.w13 is sharded as P\(None, "):
                jit(step)(same, replicated)
        everywhere = jax.NamedSharding(layer.mesh, jax.P())
        advised = jax.jit(lambda x, params: step(jax.reshard(x, everywhere), params))
        np.testing.assert_array_equal(advised(split, prepared), expected)


def test_a_shard_map_that_the_layer_cannot_run_in_is_refused(rng):
    layer = data_and_tensor(AxisType.Auto)
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)

    def inside(layer, params, mesh, **axes):
        with pool_of(layer) as pool:
            mapped = jax.shard_map(
                lambda x: layer(x, params, pool=pool),
                mesh=mesh,
                in_specs=P(),
                out_specs=P(),
                **axes,
            )
            return jax.jit(mapped)(x)

    with pytest.raises(ValueError, match=r"over the axes \('tp',\), which leaves out \('dp',\)"):
        inside(layer, params, layer.mesh, axis_names={"tp"})
    both = make_layer(mesh=layer.mesh, tensor_axis="tp", expert_axis="dp")
    with pytest.raises(ValueError, match=r"split over \('dp', 'tp'\), but inside a shard_map over"):
        inside(both, both.prepare(make_params(rng, both)), layer.mesh, axis_names={"tp"})
    with pytest.raises(
        ValueError, match=re.escape("mesh is {'dp': 2, 'tp': 2}, but the call is i")
    ):
        inside(layer, params, mesh_of(other=4))


def test_a_devices_part_is_asked_for_inside_a_shard_map(rng):
    layer = data_and_tensor(AxisType.Auto)
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    with pytest.raises(ValueError, match=r"partial is called outside a shard_map over the layer's"):
        layer.partial(x, params)


def test_a_mesh_in_force_with_axes_of_other_types_is_named(rng):
    layer, other = data_and_tensor(AxisType.Auto), data_and_tensor(AxisType.Explicit)
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    with (
        pool_of(layer) as pool,
        jax.set_mesh(other.mesh),
        pytest.raises(ValueError, match="mesh has axes of the types Auto, Auto, but the one of ja"),
    ):
        jax.jit(lambda x, params: layer(x, params, pool=pool))(x, params)


@pytest.mark.parametrize("axis", ["tensor_axis", "expert_axis"])
@pytest.mark.parametrize("what", ["x", "token_mask", "residual"])
def test_what_differs_along_the_layers_axes_is_refused_inside_a_shard_map(rng, axis, what):
    layer = make_layer(mesh=mesh_of(tp=2), **{axis: "tp"})
    params, x = layer.prepare(make_params(rng, layer)), make_x(rng, 4)
    arguments = {"x": x, "token_mask": jnp.ones(4, jnp.bool_), "residual": x}
    specs = {name: P("tp") if name == what else P() for name in arguments}

    def step(params, arguments):
        mask, residual = arguments["token_mask"], arguments["residual"]
        weight = jnp.ones(HIDDEN, x.dtype)
        return layer.add_norm(
            arguments["x"], params, residual, weight, 1e-6, pool=pool, token_mask=mask
        )

    def mapped(specs):
        in_specs = (layer.param_specs(params), specs)
        return jax.jit(
            jax.shard_map(step, mesh=layer.mesh, in_specs=in_specs, out_specs=(P(), P()))
        )

    with pool_of(layer) as pool:
        # Each device has half of it, so that its shape is that of two tokens: twice as many for it.
        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), arguments[what])
        with pytest.raises(ValueError, match=rf"{what} differs from device to device along 'tp'"):
            mapped(specs)(params, {**arguments, what: twice})
        same = mapped({name: P() for name in arguments})(params, arguments)
        expected = jax.jit(step)(params, arguments)
        jax.tree.map(np.testing.assert_array_equal, same, expected)
