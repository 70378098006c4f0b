"""Serving: the trained model on one device or several, each holding its part of every expert.

Columns of the routed and shared experts and of the draft head are split; attention, norms and
embeddings are the same on every device. Each MoE layer, and the draft head, ends in one all-reduce
on a pool of channels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.flax_moe.model import Decoder
from jax_b12x import comm
from jax_b12x.comm.topology import MAX_WORLD_SIZE
from jax_b12x.flax import MoELayer, SwiGLU
from jax_b12x.moe.geometry import BLOCK
from jax_b12x.moe.sharding import SHARED_BLOCK

AXIS = "tp"


def choose_devices(count: int) -> list[jax.Device]:
    """Returns devices to serve on, from a process that has not used JAX yet.

    Where there is no GPU, the CPU becomes as many devices as are asked for.

    Raises:
      ValueError: there are fewer.
    """
    if count > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # XLA's CPU client can wait for itself for ever with more devices than threads.
        os.environ.setdefault("NPROC", "64")
        # Once JAX has started its devices are what they are.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if not 1 <= count <= len(devices):
        sees = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
        raise ValueError(
            f"--devices is {count}; "
            + ("it must be 1 or more" if count < 1 else f"JAX sees {sees}")
        )
    return devices[:count]


class SplitSwiGLU(nnx.Module):
    """A dense gated feed-forward network whose columns are split over the pool's devices."""

    def __init__(self, whole: SwiGLU, pool: comm.ChannelPool) -> None:
        """Splits ``whole``.

        Raises:
          ValueError: the columns do not split evenly.
        """
        down = whole.down.kernel[...]
        columns, hidden = down.shape
        mesh, (axis,) = pool.topology.mesh, pool.topology.axes
        if columns % pool.world_size:
            raise ValueError(
                f"{columns} columns do not split evenly over {pool.world_size} devices"
            )
        # Gate and up apart, so that a device's part has the same columns of both.
        gate_up = whole.gate_up.kernel[...].reshape(hidden, 2, columns)
        self.dtype = whole.down.dtype or down.dtype
        self.pool = pool
        self.specs = (PartitionSpec(None, None, axis), PartitionSpec(axis))
        self.gate_up, self.down = (
            nnx.Param(jax.device_put(array, NamedSharding(mesh, spec)))
            for array, spec in zip((gate_up, down), self.specs, strict=True)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., hidden]`` to ``[..., hidden]``."""

        def part(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
            gate, up = jnp.moveaxis(jnp.tensordot(x, gate_up, 1), -2, 0)
            return comm.all_reduce((jax.nn.silu(gate) * up) @ down, self.pool)

        everywhere = PartitionSpec()
        split = jax.shard_map(
            part,
            mesh=self.pool.topology.mesh,
            in_specs=(everywhere, *self.specs),
            out_specs=everywhere,
        )
        arrays = (self.gate_up[...], self.down[...])
        return split(x.astype(self.dtype), *(array.astype(self.dtype) for array in arrays))


def check_split(model: Decoder, devices: int) -> None:
    """Refuses a number of devices that the model's columns do not split over.

    Args:
      model: with packed experts.
      devices: how many.

    Raises:
      ValueError: says which numbers would do.
    """
    block = model.blocks[0].moe
    experts = block.experts.weights.get_value()
    widths = {
        "routed experts": (experts.intermediate, BLOCK[experts.format]),
        "shared experts": (block.shared.down.kernel.shape[0], SHARED_BLOCK),
        "the draft head": (model.draft_head.mlp.down.kernel.shape[0], 1),
    }

    def fits(count: int) -> bool:
        return all(columns % (count * multiple) == 0 for columns, multiple in widths.values())

    if not fits(devices):
        columns = ", ".join(
            f"{name} {columns} in blocks of {multiple}" if multiple > 1 else f"{name} {columns}"
            for name, (columns, multiple) in widths.items()
        )
        allowed = ", ".join(str(count) for count in range(1, MAX_WORLD_SIZE + 1) if fits(count))
        raise ValueError(
            f"--devices is {devices}; the model's columns split over {allowed} devices ({columns})"
        )


def serve(
    model: Decoder, devices: Sequence[jax.Device] | None = None
) -> tuple[Decoder, comm.ChannelPool | None]:
    """Turns a model with packed experts into one that serves; the model given is used up.

    Args:
      model: from ``checkpoint.load_quantized``.
      devices: the devices; the default one if not given.

    Returns:
      The model, and the pool that it communicates on: ``None`` for one device.

    Raises:
      ValueError: the model does not split over so many devices.
    """
    if devices is None or len(devices) == 1:
        for block in model.blocks:
            block.moe = MoELayer.of(block.moe)
        return model, None
    check_split(model, len(devices))
    mesh = Mesh(np.array(devices), (AXIS,))
    pool = comm.ChannelPool(mesh, AXIS)
    layers = [
        MoELayer.of(block.moe, mesh=mesh, tensor_axis=AXIS, pool=pool) for block in model.blocks
    ]
    mlp = SplitSwiGLU(model.draft_head.mlp, pool)
    for block in model.blocks:
        block.moe = None
    model.draft_head.mlp = None
    # What is left is the same on every device.
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, PartitionSpec())))
    for block, layer in zip(model.blocks, layers, strict=True):
        block.moe = layer
    model.draft_head.mlp = mlp
    return model, pool
