"""Preparing a layer's parameters: each device's part, joined and in the layout that it reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_b12x.moe import joined, layer_checks, layer_plan, sharding
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.joined import JoinedExpert
from jax_b12x.moe.layer_params import LayerParams
from jax_b12x.moe.layer_plan import LayerPlan
from jax_b12x.moe.plan import MoePlan
from jax_b12x.moe.weights import ExpertWeights

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def prepare(layer: MoELayer, params: LayerParams, donate: bool) -> LayerParams:
    """Returns what :meth:`MoELayer.prepare` does, and raises what it raises."""
    layer_checks.check_container(params)
    if donate and layer.mesh is not None:
        raise ValueError("donate is True, but the layer has a mesh: del params afterwards")
    if layer.mesh is not None or donate:
        _check_not_traced(params, donate)
    made = _plan(layer)
    if layer.mesh is None and _is_joined_as(params, made, layer.recipe):
        layer_checks.check_whole(layer, params)
        return params
    layer_checks.check_not_split(layer, params)
    given = params
    if params.joined or (layer.mesh is not None and _is_in_a_layout(params)):
        params = params.unprepare()
    layer_checks.check_whole(layer, params)
    if donate and params is not given:
        jax.block_until_ready(params)
        given.experts.free()
    if layer.mesh is None:
        return _on_one_device(layer, params, donate)

    def part(position: dict[str, int]) -> LayerParams:
        expert_part = position.get(layer.expert_axis or "", 0)
        tensor_part = position.get(layer.tensor_axis or "", 0)
        experts = sharding.split_experts(
            params.experts,
            expert_parts=layer.expert_parts,
            expert_part=expert_part,
            tensor_parts=layer.tensor_parts,
            tensor_part=tensor_part,
        )
        shared, rank = params.shared, expert_part * layer.tensor_parts + tensor_part
        if isinstance(shared, DenseExpert):
            shared = sharding.split_dense(shared, layer.world_size, rank)
        elif isinstance(shared, ExpertWeights):
            shared = sharding.split_experts(shared, tensor_parts=layer.world_size, tensor_part=rank)
        parts = (layer.expert_parts, layer.tensor_parts)
        split = dataclasses.replace(params, experts=experts, shared=shared, parts=parts)
        return _on_one_device(layer, split)

    return sharding.place(part, layer.mesh, layer.param_specs)


def _plan(layer: MoELayer, joined: bool | None = None) -> LayerPlan:
    # Layouts do not depend on the dtype of x, and this one has kernels everywhere.
    return layer.plan(1, dtype=jnp.bfloat16, joined=joined)


def _check_not_traced(params: LayerParams, donate: bool) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.core.Tracer):
            name = f"params{jax.tree_util.keystr(path)}"
            if donate:
                raise TypeError(
                    f"{name} is traced and donate is True: there is nothing to free under jax.jit; "
                    "call layer.prepare outside, or leave donate out"
                )
            raise TypeError(
                f"{name} is traced, but on a mesh layer.prepare puts each part on its device: call "
                "it outside jax.jit, once, and pass what it returns to the function"
            )


def _is_in_a_layout(params: LayerParams) -> bool:
    packed = (params.experts, params.shared)
    return any(isinstance(w, ExpertWeights) and w.layout != "checkpoint" for w in packed)


def _is_joined_as(params: LayerParams, made: LayerPlan, recipe: str) -> bool:
    """Returns whether the shared expert is joined already, and nothing is left to do."""
    return (
        isinstance(params.shared, JoinedExpert)
        and made.joined == params.joined
        and made.routed.weight_layout == params.experts.layout
        and joined.scale_obstacle(params.experts, params.shared, recipe) is None
    )


def _on_one_device(layer: MoELayer, params: LayerParams, donate: bool = False) -> LayerParams:
    experts, shared = params.experts, params.shared
    made = _plan(layer)
    if made.joined and isinstance(shared, ExpertWeights):
        if joined.obstacle(experts, shared, layer.recipe) is None:
            experts, among = joined.join(experts, shared, made.joined, made.routed, donate=donate)
            return dataclasses.replace(params, experts=experts, shared=among)
        made = _plan(layer, joined=False)
    shared_plan = layer_plan.shared_plan(layer.local, made.routed)
    if isinstance(shared, ExpertWeights) and isinstance(shared_plan, MoePlan):
        shared = shared.prepare(shared_plan, donate=donate)
    experts = experts.prepare(made.routed, donate=donate)
    return dataclasses.replace(params, experts=experts, shared=shared)
