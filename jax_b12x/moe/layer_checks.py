"""The checks of an MoE layer's fields, arguments and parameters; each names what is wrong."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_b12x import arguments, comm
from jax_b12x.arguments import check_array, what
from jax_b12x.moe import checks, dense, planner, sharding
from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.geometry import BLOCK
from jax_b12x.moe.joined import JoinedExpert
from jax_b12x.moe.layer_params import LayerParams
from jax_b12x.moe.layer_plan import LayerPlan
from jax_b12x.moe.recipe import Activation, get_recipe
from jax_b12x.moe.weights import ExpertWeights

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def check_fields(layer: MoELayer) -> None:
    """Checks that a layer's fields are in range and fit together.

    Raises:
      TypeError: the mesh or the name of an axis is of another type.
      ValueError: one is not.
    """
    for name, least in (
        ("hidden", 1),
        ("intermediate", 1),
        ("num_experts", 1),
        ("top_k", 1),
        ("shared_intermediate", 0),
    ):
        check_integer(name, getattr(layer, name), least)
    formats = get_recipe(layer.recipe).weight_formats
    if not isinstance(layer.activation, Activation):
        raise ValueError(
            f"activation is {layer.activation!r}; it must be an Activation, such as moe.SILU"
        )
    if layer.top_k > layer.num_experts:
        raise ValueError(
            f"top_k is {layer.top_k}; it must be at most num_experts ({layer.num_experts})"
        )
    for name, allowed in (
        ("shared_format", ("dense", "nvfp4")),
        ("overlap", ("auto", "off")),
        ("weight_format", formats),
        ("renormalize", (True, False)),
    ):
        if getattr(layer, name) not in allowed:
            raise ValueError(
                f"{name} is {getattr(layer, name)!r}; it must be {' or '.join(map(repr, allowed))}"
            )
    if layer.router not in ("softmax", "sigmoid") and not callable(layer.router):
        raise ValueError(
            f"router is {layer.router!r}; it must be 'softmax', 'sigmoid' or a function of "
            "logits and token mask"
        )
    _check_routing(layer)
    _check_mesh(layer)
    if layer.mesh is None and layer.axes:
        raise ValueError(f"mesh is None, but the layer is split over the axes {layer.axes}")
    if layer.mesh is not None:
        if not layer.axes:
            raise ValueError(
                "a mesh is given, but neither tensor_axis nor expert_axis: name one of its "
                f"axes {layer.mesh.axis_names}"
            )
        for axis in layer.axes:
            if axis not in layer.mesh.axis_names:
                raise ValueError(f"{axis!r} is no axis of the mesh {layer.mesh.axis_names}")
        if layer.tensor_axis == layer.expert_axis:
            raise ValueError(
                f"tensor_axis and expert_axis are both {layer.tensor_axis!r}; they must be two "
                "axes of the mesh"
            )
    sharding.check_intermediate(
        "intermediate",
        layer.intermediate,
        layer.tensor_parts,
        BLOCK[layer.weight_format],
        f"the block of {layer.weight_format}",
    )
    if layer.shared_intermediate:
        sharding.check_intermediate(
            "shared_intermediate",
            layer.shared_intermediate,
            layer.world_size,
            sharding.SHARED_BLOCK,
            "the block of nvfp4 and of dense kernels",
        )


def check_integer(name: str, value: Any, least: int) -> None:
    """Refuses what is no integer, or a smaller one.

    Raises:
      ValueError: names it and what it must be.
    """
    arguments.check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")


def _check_mesh(layer: MoELayer) -> None:
    """Checks the types of the mesh and of the names of its axes."""
    mesh: Any = layer.mesh
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is {what(mesh)}; it must be a jax.sharding.Mesh, such as "
            "jax.make_mesh((2,), ('tp',))"
        )
    for name in ("tensor_axis", "expert_axis"):
        axis = getattr(layer, name)
        if axis is None or isinstance(axis, str):
            continue
        of = "" if mesh is None else f" of the mesh {mesh.axis_names}"
        raise TypeError(
            f"{name} is {axis!r}; it must be the name of one axis{of}: give the layer a mesh whose "
            "axis is all the devices to split over, or name the other axis as "
            f"{'expert_axis' if name == 'tensor_axis' else 'tensor_axis'}"
        )


def _check_routing(layer: MoELayer) -> None:
    """Checks what becomes of the router's scores."""
    scale: Any = layer.routed_scaling_factor
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale):
        raise ValueError(
            f"routed_scaling_factor is {scale!r}; it must be a finite number, and no array: it is "
            "part of the program"
        )
    for name in ("num_groups", "topk_groups"):
        value = getattr(layer, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer, 1 or more")
    if layer.router == "sigmoid":
        checks.check_groups(layer.num_experts, layer.top_k, layer.num_groups, layer.topk_groups)
        return
    left_alone: dict[str, Any] = {"num_groups": 1, "topk_groups": 1}
    who = "a softmax router has no groups"
    if callable(layer.router):
        left_alone |= {"renormalize": True, "routed_scaling_factor": 1.0}
        who = "a router that is a function returns weights that are finished"
    for name, default in left_alone.items():
        if getattr(layer, name) != default:
            raise ValueError(f"{name} is {getattr(layer, name)!r}; {who}: leave it at {default!r}")


def check_call(
    layer: MoELayer,
    x: jax.Array,
    params: LayerParams,
    pool: comm.ChannelPool | None,
    token_mask: jax.Array | None,
) -> None:
    """Checks what a call is given, but for the shapes of the parameters.

    Raises:
      TypeError: an argument is of another type or dtype.
      ValueError: ``x`` or the mask has another shape, the parameters are split another way, or the
        pool is missing or another axis's.
    """
    check_tokens(layer, x, token_mask)
    check_container(params)
    _check_shared_dtype(x, params)
    parts = (layer.expert_parts, layer.tensor_parts)
    if params.parts != parts:
        raise ValueError(
            f"params are split over {params.parts} devices (experts, columns), the layer over "
            f"{parts}: call layer.prepare(params) once, after loading"
        )
    check_pool(layer, pool)


def check_pool(layer: MoELayer, pool: comm.ChannelPool | None) -> None:
    """Checks that a pool is the layer's, and that there is one where it is split.

    Raises:
      TypeError: it is of another type.
      ValueError: it is missing, over other axes, or not needed.
    """
    if layer.mesh is None:
        if pool is not None:
            raise ValueError("a pool is given, but the layer has no mesh and reduces nothing")
        return
    if pool is None:
        raise ValueError(
            f"pool is None; the layer is split over {layer.axes}: make one pool for its model, "
            f"{_pool_of(layer)}"
        )
    if not isinstance(pool, comm.ChannelPool):
        raise TypeError(f"pool is {what(pool)}; it must be a {_pool_of(layer)}")
    if set(pool.topology.axes) != set(layer.axes):
        raise ValueError(
            f"pool is over the axes {pool.topology.axes}; the layer is split over {layer.axes} "
            "and reduces over all of them at once"
        )


def _pool_of(layer: MoELayer) -> str:
    """Returns how the layer's pool is made, as code."""
    return f"comm.ChannelPool(mesh, {layer.axes if len(layer.axes) > 1 else layer.axes[0]!r})"


def check_tokens(layer: MoELayer, x: jax.Array, token_mask: jax.Array | None) -> None:
    """Checks the tokens of a call.

    Raises:
      TypeError: one is no array, or ``x`` has another dtype.
      ValueError: one has another shape, or the mask another dtype.
    """
    check_array("x", x)
    if x.dtype.name not in planner.DTYPES:
        raise TypeError(f"x has dtype {x.dtype.name}; it must be {' or '.join(planner.DTYPES)}")
    if x.ndim != 2 or x.shape[1] != layer.hidden:
        raise ValueError(
            f"x has shape {x.shape}; it must be [num_tokens, hidden], with hidden {layer.hidden}"
        )
    if token_mask is not None:
        checks.check_token_mask(token_mask, x.shape[0])


def check_container(params: LayerParams) -> None:
    """Checks that parameters are a ``LayerParams`` of experts; their arrays may be anything.

    Raises:
      TypeError: they are not.
    """
    made = "moe.LayerParams(router, experts, shared)"
    if not isinstance(params, LayerParams):
        raise TypeError(f"params is {what(params)}; it must be a {made}")
    if not isinstance(params.experts, ExpertWeights):
        raise TypeError(
            f"params.experts is {what(params.experts)}; it must be an ExpertWeights: {made}"
        )
    kinds = (DenseExpert, ExpertWeights, JoinedExpert, type(None))
    if not isinstance(params.shared, kinds):
        raise TypeError(
            f"params.shared is {what(params.shared)}; it must be a DenseExpert, an "
            f"ExpertWeights or None: {made}"
        )


def _check_shared_dtype(x: jax.Array, params: LayerParams) -> None:
    """Checks that a dense shared expert is computed in the dtype that it has."""
    if not isinstance(params.shared, DenseExpert):
        return
    for name in ("w13", "w2", "shared_gate"):
        array = getattr(params.shared, name)
        if array is None or not hasattr(array, "dtype") or array.dtype == x.dtype:
            continue
        raise TypeError(
            f"params.shared.{name} has dtype {array.dtype.name} and x {x.dtype.name}; a dense "
            f"shared expert has the dtype of x: convert it once, before layer.prepare, with "
            f"params.shared.astype({x.dtype.name!r}) (of a Flax block: MoELayer.of(block, "
            f"dtype={x.dtype.name!r})), or convert x"
        )


def check_whole(layer: MoELayer, params: LayerParams) -> None:
    """Checks that parameters are those of the whole layer.

    Raises:
      TypeError: one is of another type.
      ValueError: they are not.
    """
    check_not_split(layer, params)
    _check_params(layer, params, layer.num_experts, layer.intermediate, layer.shared_intermediate)


def check_not_split(layer: MoELayer, params: LayerParams) -> None:
    """Checks that parameters are not split over devices yet; raises ``ValueError`` if they are."""
    if params.parts != (1, 1):
        parts = (layer.expert_parts, layer.tensor_parts)
        remedy = f"this layer is split over {parts}: load them again, and prepare those"
        if params.parts == parts:
            remedy = "call the layer with them as they are"
        raise ValueError(
            f"params are split over {params.parts} devices (experts, columns) already; {remedy}"
        )


def check_local(layer: MoELayer, x: jax.Array, params: LayerParams) -> None:
    """Checks that parameters are one device's part of the layer, and go with ``x``.

    Raises:
      TypeError: one is of another type.
      ValueError: they are not.
    """
    check_container(params)
    _check_shared_dtype(x, params)
    local = layer.local
    _check_params(layer, params, local.num_experts, local.intermediate, local.shared_intermediate)


def check_joined(made: LayerPlan, params: LayerParams) -> None:
    """Checks that a plan is for parameters that hold the shared expert as these do.

    Raises:
      TypeError: it is no plan.
      ValueError: it is not.
    """
    if not isinstance(made, LayerPlan):
        raise TypeError(
            f"plan is {what(made)}; it must be a LayerPlan, from layer.plan(num_tokens)"
        )
    if made.joined != params.joined:
        raise ValueError(
            f"plan.joined is {made.joined}, but params.joined is {params.joined}: make the plan "
            f"with layer.plan(num_tokens, joined={bool(params.joined)}), or prepare the parameters "
            "with layer.prepare"
        )


def _check_params(
    layer: MoELayer,
    params: LayerParams,
    experts: int,
    intermediate: int,
    shared: int,
) -> None:
    check_array("params.router", params.router)
    _check_leaves("params.experts", params.experts)
    for name, actual, expected in (
        ("params.router.shape", params.router.shape, (layer.num_experts, layer.hidden)),
        ("params.experts.num_experts", params.experts.num_experts, experts + params.joined),
        ("params.experts.hidden", params.experts.hidden, layer.hidden),
        ("params.experts.intermediate", params.experts.intermediate, intermediate),
        ("params.experts.format", params.experts.format, layer.weight_format),
    ):
        if actual != expected:
            raise ValueError(f"{name} is {actual!r}; the layer needs {expected!r}")
    if params.router.dtype.name not in planner.DTYPES:
        raise ValueError(
            f"params.router has dtype {params.router.dtype.name}; it must be "
            f"{' or '.join(planner.DTYPES)}"
        )
    bias = params.router_bias
    if bias is not None:
        check_array("params.router_bias", bias)
    if bias is not None and (bias.dtype != jnp.float32 or bias.shape != (layer.num_experts,)):
        raise ValueError(
            f"params.router_bias is {bias.dtype.name}{list(bias.shape)}; it must be "
            f"float32[{layer.num_experts}]"
        )
    if params.shared is None or not layer.shared_intermediate:
        if (params.shared is None) != (not layer.shared_intermediate):
            raise ValueError(
                f"params.shared is {'' if params.shared is None else 'not '}None, but "
                f"shared_intermediate is {layer.shared_intermediate}"
            )
        return
    _check_shared(layer, params, shared)


def _check_leaves(name: str, weights: ExpertWeights) -> None:
    """Refuses packed experts that hold something that is no array."""
    for field in dataclasses.fields(weights):
        if not field.metadata.get("static"):
            check_array(f"{name}.{field.name}", getattr(weights, field.name))


def _check_shared(layer: MoELayer, params: LayerParams, intermediate: int) -> None:
    if isinstance(params.shared, JoinedExpert):
        local = layer.local
        why = local.join_obstacle or ("overlap is 'off'" if layer.overlap == "off" else None)
        if why is None and params.joined != local.joined:
            why = f"here it would be {local.joined} of them"
        if why is not None:
            raise ValueError(
                f"params.shared is joined to the routed experts as {params.joined} of them, which "
                f"does not go with this layer: {why}; call layer.prepare(params.unprepare())"
            )
        return
    kind = DenseExpert if layer.shared_format == "dense" else ExpertWeights
    if not isinstance(params.shared, kind):
        raise ValueError(
            f"params.shared is a {type(params.shared).__name__}; shared_format is "
            f"{layer.shared_format!r}, which needs a {kind.__name__}"
        )
    if isinstance(params.shared, DenseExpert):
        try:
            dense.check_expert(params.shared, layer.hidden, intermediate)
        except (TypeError, ValueError) as error:
            raise type(error)(f"params.shared: {error}") from None
        return
    assert params.shared is not None
    _check_leaves("params.shared", params.shared)
    for name, actual, expected in (
        ("num_experts", params.shared.num_experts, 1),
        ("hidden", params.shared.hidden, layer.hidden),
        ("intermediate", params.shared.intermediate, intermediate),
    ):
        if actual != expected:
            raise ValueError(f"params.shared has {name} {actual}; the layer needs {expected}")
