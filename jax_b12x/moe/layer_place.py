"""Where a call of an MoE layer runs: inside a ``shard_map``, or to be mapped over its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_b12x.comm import primitives

if TYPE_CHECKING:
    from jax_b12x.moe.layer import MoELayer


def axes_to_map(layer: MoELayer) -> frozenset[str]:
    """Returns the mesh axes that a call has to be mapped over: none where it runs as it is.

    Outside ``shard_map`` these are all of the layer's mesh; inside one that is over other axes, as
    data parallelism is, those that are left.

    Raises:
      ValueError: another mesh is in force, or a ``shard_map`` is over some of the axes only.
    """
    if layer.mesh is None:
        return frozenset()
    mesh = jax.sharding.get_abstract_mesh()
    every = frozenset(layer.mesh.axis_names)
    if mesh.empty:
        return every
    if dict(mesh.shape) != dict(layer.mesh.shape):
        raise ValueError(
            f"mesh is {dict(layer.mesh.shape)}, but the call is inside jax.set_mesh or shard_map "
            f"with {dict(mesh.shape)}: make the layer with the mesh that its model runs on"
        )
    if not mesh.manual_axes and mesh.axis_types != layer.mesh.axis_types:
        raise ValueError(
            f"mesh has axes of the types {_types(layer.mesh)}, but the one of jax.set_mesh has "
            f"{_types(mesh)}: make the layer with the mesh that its model runs on"
        )
    left = every - frozenset(mesh.manual_axes)
    to_map = [axis for axis in layer.axes if axis in left]
    if not to_map:
        left_out = [axis for axis in mesh.axis_names if axis in left and mesh.shape[axis] > 1]
        if left_out:
            raise ValueError(
                f"the layer is inside a shard_map over the axes {tuple(mesh.manual_axes)}, which "
                f"leaves out {tuple(left_out)}: leave axis_names out of shard_map, and name these "
                "axes in its specs"
            )
        return frozenset()
    if len(to_map) < len(layer.axes):
        raise ValueError(
            f"the layer is split over {layer.axes}, but inside a shard_map over "
            f"{tuple(mesh.manual_axes)}: leave axis_names out of shard_map, or name none of the "
            "layer's axes there"
        )
    return left


def check_inside(layer: MoELayer) -> None:
    """Checks that a device's part is computed where there are devices.

    Raises:
      ValueError: it is not inside a ``shard_map`` over the layer's axes.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not set(layer.axes) <= set(manual):
        raise ValueError(
            f"partial is called outside a shard_map over the layer's axes {layer.axes}: call it "
            "inside one, with params split as layer.param_specs says, or call the layer itself"
        )


def check_same_on_devices(layer: MoELayer, arguments: Mapping[str, Any]) -> None:
    """Checks that arrays do not differ along the layer's axes, inside a ``shard_map`` over them.

    JAX tells where its ``check_vma`` is on; otherwise nothing is known.

    Args:
      layer: the layer.
      arguments: from a name to an array, or ``None``.

    Raises:
      ValueError: one may differ; names it.
    """
    for name, array in arguments.items():
        if array is None:
            continue
        differs = [a for a in layer.axes if a in primitives.varying(jax.typeof(array))]
        if differs:
            axes = differs[0] if len(differs) == 1 else tuple(differs)
            raise ValueError(
                f"{name} differs from device to device along {axes!r}, over which the layer is "
                f"split; the layer takes it the same on all of them: give it an in_spec of "
                f"shard_map that leaves {axes!r} out. Where it is the same in fact, as after "
                f"jax.lax.all_gather, jax.lax.pmax({name}, {axes!r}) tells JAX so"
            )


def check_shardings(arguments: Mapping[str, tuple[Any, Any]]) -> None:
    """Checks that arrays lie on an Explicit mesh as the layer takes them.

    There JAX moves nothing unless it is asked to.

    Args:
      arguments: from a name to an argument, a pytree, and its ``PartitionSpec``.

    Raises:
      ValueError: one does not; names it.
    """
    for name, (argument, specs) in arguments.items():
        leaves = jax.tree_util.tree_leaves_with_path(argument)
        for (path, leaf), spec in zip(leaves, _spec_leaves(specs, len(leaves)), strict=True):
            aval = jax.typeof(leaf)
            mesh = aval.sharding.mesh
            if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
                continue
            found, wanted = _names(aval.sharding.spec), _names(spec)
            if found in (wanted, _names(_without_size_one(spec, mesh))):
                continue
            array = f"{name}{jax.tree_util.keystr(path)}"
            sharded = f"{array} is sharded as {aval.sharding.spec} over an Explicit mesh"
            if name == "params":
                raise ValueError(
                    f"{sharded}; the layer needs {spec}, which is how layer.prepare(params) and "
                    "layer.param_specs(params) have it"
                )
            raise ValueError(
                f"{sharded}; the layer takes it the same on every device: pass jax.reshard("
                f"{array}, jax.NamedSharding(mesh, jax.P())), or call the layer inside a shard_map"
            )


def _spec_leaves(specs: Any, count: int) -> list[PartitionSpec]:
    if isinstance(specs, PartitionSpec):
        return [specs] * count
    return jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def _types(mesh: Mesh | AbstractMesh) -> str:
    return ", ".join(kind.name for kind in mesh.axis_types)


def _names(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes that each axis of an array is split over, without the last empty."""
    names = [(axis,) if isinstance(axis, str) else tuple(axis or ()) for axis in spec]
    while names and not names[-1]:
        names.pop()
    return names


def _without_size_one(spec: PartitionSpec, mesh: AbstractMesh) -> PartitionSpec:
    """Returns a spec as ``jax_remove_size_one_mesh_axis_from_type`` has it."""
    return PartitionSpec(
        *(tuple(name for name in axis if mesh.shape[name] > 1) for axis in _names(spec))
    )
