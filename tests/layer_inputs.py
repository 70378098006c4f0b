"""Random MoE layers for tests, split over meshes too, and what they give on one device in fp32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from moe_inputs import random_weights

from jax_b12x import comm, moe
from jax_b12x.moe import layer_routes, reference

HIDDEN, INTERMEDIATE, SHARED = 64, 128, 64


def make_layer(**changes):
    fields = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "num_experts": 8,
        "top_k": 3,
        "shared_intermediate": SHARED,
    }
    return moe.MoELayer(**{**fields, **changes})


def make_params(rng, layer, *, bias=False, dtype=jnp.float32):
    size = {"hidden": layer.hidden, "num_experts": layer.num_experts}
    experts = random_weights(
        rng, intermediate=layer.intermediate, weight_format=layer.weight_format, bias=bias, **size
    )
    shared = None
    if layer.shared_intermediate and layer.shared_format == "dense":
        columns = layer.shared_intermediate
        w13 = rng.normal(size=(2 * columns, layer.hidden)) / np.sqrt(layer.hidden)
        w2 = rng.normal(size=(layer.hidden, columns)) / np.sqrt(columns)
        shared = moe.DenseExpert(jnp.asarray(w13, dtype), jnp.asarray(w2, dtype))
        if bias:
            shared = dataclasses.replace(
                shared,
                w13_bias=jnp.asarray(rng.normal(size=2 * columns), jnp.float32),
                w2_bias=jnp.asarray(rng.normal(size=layer.hidden), jnp.float32),
                shared_gate=jnp.asarray(rng.normal(size=layer.hidden) / 8, dtype),
            )
    elif layer.shared_intermediate:
        shared = random_weights(
            rng,
            hidden=layer.hidden,
            intermediate=layer.shared_intermediate,
            num_experts=1,
            bias=bias,
        )
    router = rng.normal(size=(layer.num_experts, layer.hidden))
    router_bias = rng.normal(size=layer.num_experts) / 10 if bias else None
    return moe.LayerParams(
        jnp.asarray(router, dtype),
        experts,
        shared,
        None if router_bias is None else jnp.asarray(router_bias, jnp.float32),
    )


def make_x(rng, num_tokens, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=(num_tokens, HIDDEN)), dtype)


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes))


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


def assert_within_fp32(out, whole, magnitude, *, world_size, intermediate=INTERMEDIATE):
    """Holds two fp32 computations of one sum to the bound on their difference.

    Both add the same products, in other orders: over ``hidden`` (into the intermediate, whose
    relative error the second product hands on) and ``intermediate`` (of the widest expert), over
    routes, shared expert and ranks. A sum of n terms in any order errs by at most (n - 1) * 2**-24
    of the sum of magnitudes; rounding errors of so many terms add up like a random walk, so that 8
    standard deviations, on each side, bound them. Magnitudes inside an output cancel: by at most
    the 16 here, a walk's sqrt(intermediate) with room.
    """
    terms = HIDDEN + intermediate + 16 + world_size
    bound = 2 * 8 * np.sqrt(terms) * 2.0**-24 * 16 * np.maximum(magnitude, magnitude.mean())
    assert np.all(np.abs(np.asarray(out, np.float64) - whole) <= bound)


# Compiled once for each shape, which takes far longer than to run it: the oracle is called a route
# at a time, for at least so many tokens, whatever a test has.
reference_moe = jax.jit(reference.moe, static_argnames=("recipe", "activation"))
_ORACLE_TOKENS = 40


def oracle(layer, x, params):
    """The layer on one device in fp32, not rounded, by the op's reference; and its magnitude.

    The magnitude of an output is the sum of the magnitudes of the routes' and the shared expert's
    outputs: rounding errors of sums in any order are relative to that.
    """
    exact = dataclasses.replace(layer, mesh=None, tensor_axis=None, expert_axis=None)
    ids, weights = layer_routes.routes(exact, x, params, None, decode=False)
    # Rows of zeros without routes behind the tokens.
    more = ((0, max(0, _ORACLE_TOKENS - len(x))), (0, 0))
    wide = np.pad(np.asarray(x, np.float32), more)
    ids, weights = np.pad(ids, more, constant_values=-1), np.pad(weights, more)
    act = {"recipe": layer.recipe, "activation": layer.activation}
    total = magnitude = np.zeros(wide.shape, np.float32)
    for k in range(layer.top_k):
        one = reference_moe(wide, params.experts, ids[:, k : k + 1], weights[:, k : k + 1], **act)
        total, magnitude = total + np.asarray(one), magnitude + np.abs(one)
    if isinstance(params.shared, moe.DenseExpert):
        expert = jax.tree.map(lambda array: array.astype(jnp.float32), params.shared)
        y = np.asarray(_dense_mlp(wide, expert, activation=layer.activation))
        total, magnitude = total + y, magnitude + np.abs(y)
    elif params.shared is not None:
        zeros = np.zeros((len(wide), 1), np.int32)
        y = np.asarray(reference_moe(wide, params.shared, zeros, np.ones_like(wide[:, :1]), **act))
        total, magnitude = total + y, magnitude + np.abs(y)
    return total[: len(x)], magnitude[: len(x)]


_dense_mlp = jax.jit(reference.dense_mlp, static_argnames="activation")
