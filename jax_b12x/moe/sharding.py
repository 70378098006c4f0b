"""Splitting a layer's parameters over a mesh: tensor parallel, expert parallel, or both.

A split :class:`ExpertWeights` holds the parts of all devices joined along its first axis, which a
``PartitionSpec`` of the mesh axes splits again; inside ``shard_map`` each device sees its own part,
which is an ordinary ``ExpertWeights`` of fewer experts and a smaller intermediate. So a part can be
in a device's own layout, which a slice of the whole could not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_b12x.moe.dense import DenseExpert
from jax_b12x.moe.geometry import BLOCK
from jax_b12x.moe.weights import ExpertWeights

T = TypeVar("T")

# A shared expert's columns on a device are a multiple of this.
SHARED_BLOCK = 16


def experts_a_part(num_experts: int, parts: int) -> int:
    """Returns how many experts each part holds; the last parts hold padding where it is uneven."""
    return -(-num_experts // parts)


def check_intermediate(name: str, intermediate: int, parts: int, multiple: int, why: str) -> None:
    """Refuses an intermediate that does not split.

    Raises:
      ValueError: a part would not be a whole number of ``multiple`` columns; says what would do.
    """
    if intermediate % (parts * multiple):
        raise ValueError(
            f"{name} is {intermediate}, which does not split over {parts} devices: "
            f"{intermediate} / {parts} must be a multiple of {multiple}, {why}; split fewer ways, "
            f"or split experts instead of columns"
        )


def split_experts(
    weights: ExpertWeights,
    *,
    expert_parts: int = 1,
    expert_part: int = 0,
    tensor_parts: int = 1,
    tensor_part: int = 0,
) -> ExpertWeights:
    """Returns one device's part of an MoE layer's experts.

    The outputs of all parts, each for the ids of its own experts, add up to the layer's.

    Args:
      weights: all experts, in the ``checkpoint`` layout.
      expert_parts: how many devices the experts are split over. Each holds ``ceil(num_experts /
        expert_parts)``; where that is uneven the last ones hold copies that no id may select.
      expert_part: which part.
      tensor_parts: how many devices ``intermediate`` is split over.
      tensor_part: which part. The bias of the second product is in part 0 alone.

    Raises:
      ValueError: the weights are in a device's layout, or a part of ``intermediate`` is not a whole
        number of quantization blocks.
    """
    if weights.layout != "checkpoint":
        raise ValueError(
            f"weights.layout is {weights.layout!r}; experts are split as they were loaded "
            "(ExpertWeights.unprepare() gives that back), and each part is prepared afterwards"
        )
    block = BLOCK[weights.format]
    check_intermediate(
        "intermediate", weights.intermediate, tensor_parts, block, f"the block of {weights.format}"
    )
    count = experts_a_part(weights.num_experts, expert_parts)
    chosen = np.minimum(
        np.arange(expert_part * count, (expert_part + 1) * count), weights.num_experts - 1
    )
    columns = weights.intermediate // tensor_parts
    low, high = tensor_part * columns, (tensor_part + 1) * columns

    def experts(array: jax.Array) -> jax.Array:
        if array.ndim == 0 or expert_parts == 1:
            return array
        if chosen[-1] - chosen[0] + 1 != count:
            return array[chosen]
        wanted = slice(int(chosen[0]), int(chosen[-1]) + 1, None)
        for shard in array.addressable_shards:
            if shard.index[0] == wanted:  # loaded split: nothing has to be gathered
                part: jax.Array = shard.data
                return part
        return array[wanted]

    def rows(array: jax.Array) -> jax.Array:
        array = experts(array)
        if tensor_parts == 1 or array.shape[1] == 0:
            return array
        by_half = array.reshape(array.shape[0], 2, weights.intermediate, *array.shape[2:])
        part = by_half[:, :, low:high]
        return part.reshape(array.shape[0], 2 * columns, *array.shape[2:])

    bias = experts(weights.w2_bias)
    return dataclasses.replace(
        weights,
        w13=rows(weights.w13),
        w13_scale=rows(weights.w13_scale),
        w13_global_scale=experts(weights.w13_global_scale),
        w2=experts(weights.w2)[..., low // 2 : high // 2],
        w2_scale=experts(weights.w2_scale)[..., low // block : high // block],
        w2_global_scale=experts(weights.w2_global_scale),
        w2_input_scale=experts(weights.w2_input_scale),
        w13_bias=rows(weights.w13_bias),
        w2_bias=bias if tensor_part == 0 else jnp.zeros_like(bias),
        intermediate=columns,
    )


def split_dense(weights: DenseExpert, parts: int, part: int) -> DenseExpert:
    """Returns one device's part of a dense expert, split over its intermediate; parts add up.

    Raises:
      ValueError: the intermediate does not split evenly.
    """
    intermediate = weights.intermediate
    check_intermediate(
        "shared_intermediate", intermediate, parts, SHARED_BLOCK, "the block of dense kernels"
    )
    columns = intermediate // parts
    low, high = part * columns, (part + 1) * columns

    def rows(array: jax.Array) -> jax.Array:
        return jnp.concatenate([array[low:high], array[intermediate + low : intermediate + high]])

    bias = weights.w2_bias
    return dataclasses.replace(
        weights,
        w13=rows(weights.w13),
        w2=weights.w2[:, low:high],
        w13_bias=None if weights.w13_bias is None else rows(weights.w13_bias),
        w2_bias=bias if bias is None or part == 0 else jnp.zeros_like(bias),
    )


def experts_spec(weights: ExpertWeights, axes: Sequence[str]) -> ExpertWeights:
    """Returns the ``PartitionSpec`` of each array of split experts, as a pytree of their shape."""
    first = PartitionSpec(tuple(axes)) if axes else PartitionSpec()
    spec: ExpertWeights = jax.tree.map(
        lambda leaf: first if np.ndim(leaf) else PartitionSpec(), weights
    )
    return spec


def dense_spec(weights: DenseExpert, axes: Sequence[str]) -> DenseExpert:
    """Returns the ``PartitionSpec`` of each array of a split dense expert, likewise."""
    split = tuple(axes) or None
    first: Any = PartitionSpec(split)
    columns: Any = PartitionSpec(None, split)
    same: Any = PartitionSpec()
    return DenseExpert(
        w13=first,
        w2=columns,
        w13_bias=None if weights.w13_bias is None else first,
        w2_bias=None if weights.w2_bias is None else first,
        shared_gate=None if weights.shared_gate is None else same,
    )


def place(make: Callable[[dict[str, int]], T], mesh: Mesh, spec: Callable[[T], Any]) -> T:
    """Returns arrays over a mesh, made of the part of each of this process's devices.

    Parts are made one after the other, so that the memory of one beside the whole suffices.

    Args:
      make: from a device's position on each mesh axis to its part, a pytree of arrays anywhere.
      mesh: the mesh.
      spec: from a part to the ``PartitionSpec`` of each of its leaves.
    """
    placed: list[T] = []
    for index, device in np.ndenumerate(mesh.devices):
        if device.process_index != jax.process_index(device.client):
            continue
        position = dict(zip(mesh.axis_names, index, strict=True))
        placed.append(jax.device_put(make(position), device))

    def join(partition: PartitionSpec, *parts: jax.Array) -> jax.Array:
        shape = list(parts[0].shape)
        for axis, names in enumerate(partition):
            split = (names,) if isinstance(names, str) else names or ()
            shape[axis] *= math.prod(mesh.shape[name] for name in split)
        return jax.make_array_from_single_device_arrays(
            tuple(shape), NamedSharding(mesh, partition), list(parts)
        )

    joined: T = jax.tree.map(
        join, spec(placed[0]), *placed, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    return joined
