"""Random layers for ``bench layer``: drawn on the device, in the layout that its kernels read."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_b12x import capability, moe
from jax_b12x.bench import data
from jax_b12x.moe import joined as joined_expert
from jax_b12x.moe import sharding
from jax_b12x.moe.layer_plan import SharedFormat

T = TypeVar("T")


def random_chain(layer: moe.MoELayer, count: int, seed: int) -> list[moe.LayerParams]:
    """Returns the parameters of ``count`` layers, without shared experts.

    Packed experts are the same in all of them, in memory of their own; routers differ. On a mesh
    every device has the same part.
    """
    local = layer.local
    rng = np.random.default_rng(seed)
    part = moe.MoELayer(
        hidden=layer.hidden,
        intermediate=local.intermediate,
        num_experts=local.num_experts,
        top_k=local.top_k,
    )
    drawn = data.random_experts(rng, 1, layer.hidden, local.intermediate)
    experts = _prepared(part, _repeated(drawn, local.num_experts, seed))
    chain = []
    for index in range(count):
        key = jax.random.key(seed * count + index)
        router = jax.random.normal(key, (layer.num_experts, layer.hidden), jnp.bfloat16)
        router = router * jnp.bfloat16(2 / math.sqrt(layer.hidden))
        chain.append(_placed(layer, moe.LayerParams(router, jax.tree.map(jnp.copy, experts))))
    return chain


def with_shared(
    layer: moe.MoELayer, chain: list[moe.LayerParams], shared_format: SharedFormat, seed: int
) -> list[moe.LayerParams]:
    """Returns the parameters with shared experts, each in memory of its own."""
    columns = layer.local.shared_intermediate
    rng = np.random.default_rng(seed + 1)
    if shared_format == "dense":
        shape = (3 * columns, layer.hidden)
        weights = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        shared: moe.DenseExpert | moe.ExpertWeights = moe.DenseExpert(
            w13=weights[: 2 * columns] * jnp.bfloat16(1 / math.sqrt(layer.hidden)),
            w2=weights[2 * columns :].T * jnp.bfloat16(1 / math.sqrt(columns)),
        )
    else:
        alone = moe.MoELayer(hidden=layer.hidden, intermediate=columns, num_experts=1, top_k=1)
        shared = _prepared(alone, data.random_experts(rng, 1, layer.hidden, columns))
    with_one = dataclasses.replace(layer, shared_format=shared_format)
    placed = _placed_shared(with_one, shared, len(chain))
    return [dataclasses.replace(one, shared=own) for one, own in zip(chain, placed, strict=True)]


def joined(layer: moe.MoELayer, chain: list[moe.LayerParams]) -> list[moe.LayerParams]:
    """Returns the parameters with packed shared experts joined to the routed ones, in new memory.

    Args:
      layer: whose shared expert can be joined.
      chain: from :func:`with_shared`.
    """
    made = dataclasses.replace(layer, shared_format="nvfp4").plan(1, joined=True)
    mesh = layer.mesh
    replicated: Any = PartitionSpec()

    def spec(part: tuple[moe.ExpertWeights, moe.JoinedExpert]) -> Any:
        own = dataclasses.replace(part[1], w13_input_scale=replicated)
        return sharding.experts_spec(part[0], layer.axes), own

    def one(params: moe.LayerParams) -> moe.LayerParams:
        assert isinstance(params.shared, moe.ExpertWeights)
        apart = params.experts, params.shared
        if mesh is not None:
            apart = jax.tree.map(lambda array: array.addressable_shards[0].data, apart)
        both = joined_expert.join(*apart, made.joined, made.routed)
        if mesh is not None:
            both = sharding.place(functools.partial(_everywhere, both), mesh, spec)
        return dataclasses.replace(params, experts=both[0], shared=both[1])

    return [one(params) for params in chain]


def _repeated(one: moe.ExpertWeights, count: int, seed: int) -> moe.ExpertWeights:
    """Returns ``count`` experts like ``one``, with codes of their own."""
    key = jax.random.key(seed)

    def repeat(array: jax.Array) -> jax.Array:
        if array.ndim == 0:
            return array
        if array.dtype == jnp.uint8:
            return jax.random.bits(
                jax.random.fold_in(key, array.size), (count, *array.shape[1:]), jnp.uint8
            )
        return jnp.broadcast_to(array, (count, *array.shape[1:])).copy()

    repeated: moe.ExpertWeights = jax.tree.map(repeat, one)
    return repeated


def _prepared(layer: moe.MoELayer, experts: moe.ExpertWeights) -> moe.ExpertWeights:
    plan = layer.plan(1, device=capability.current()).routed
    return experts.prepare(plan, donate=True)


def _placed(layer: moe.MoELayer, local: moe.LayerParams) -> moe.LayerParams:
    if layer.mesh is None:
        return local
    local = dataclasses.replace(local, parts=(layer.expert_parts, layer.tensor_parts))
    return sharding.place(functools.partial(_everywhere, local), layer.mesh, layer.param_specs)


def _placed_shared(
    layer: moe.MoELayer, shared: moe.DenseExpert | moe.ExpertWeights, count: int
) -> list[moe.DenseExpert | moe.ExpertWeights]:
    copies = [jax.tree.map(jnp.copy, shared) for _ in range(count)]
    if layer.mesh is None:
        return copies

    def spec(part: moe.DenseExpert | moe.ExpertWeights) -> moe.DenseExpert | moe.ExpertWeights:
        if isinstance(part, moe.DenseExpert):
            return sharding.dense_spec(part, layer.axes)
        return sharding.experts_spec(part, layer.axes)

    mesh = layer.mesh
    return [sharding.place(functools.partial(_everywhere, part), mesh, spec) for part in copies]


def _everywhere(part: T, _: dict[str, int]) -> T:
    return part
