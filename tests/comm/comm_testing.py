"""Meshes, oracles and kinds of pool for the tests of channels.

The hazards of a channel do not depend on what it carries: a test of them takes a ``Kind`` and runs
for each kind of pool there is.
"""

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_b12x import comm

P = PartitionSpec
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# The platforms that a test of two ranks runs on; CI has the first.
PLATFORMS = ("cpu", pytest.param("gpu", marks=pytest.mark.multigpu))


def mesh_of(world_size: int, platform: str = "cpu", groups: int = 1) -> Mesh:
    devices = jax.devices(platform)
    if len(devices) < groups * world_size:
        pytest.skip(f"needs {groups * world_size} {platform} devices")
    grid = np.array(devices[: groups * world_size]).reshape(groups, world_size)
    return Mesh(grid[0], ("tp",)) if groups == 1 else Mesh(grid, ("dp", "tp"))


def random_parts(seed: int, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """One message for each device, stacked along the first dimension."""
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((mesh.devices.size, *shape)).astype(dtype)
    return jax.device_put(parts, NamedSharding(mesh, P(mesh.axis_names)))


def rank_order_sum(parts: Any, world_size: int) -> np.ndarray:
    """The sum of each group in fp32 in rank order, rounded once; one row for each device."""
    parts = np.asarray(parts)
    groups = parts.reshape(-1, world_size, *parts.shape[1:])
    total = groups[:, 0].astype(np.float32)
    for rank in range(1, world_size):
        total = total + groups[:, rank].astype(np.float32)
    return np.repeat(total.astype(parts.dtype), world_size, axis=0)


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def on_each(mesh: Mesh, body: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """``body`` on every device's message, as a function of the stacked messages."""

    def of_one(*parts: Any) -> Any:
        result = body(*(part[0] for part in parts))
        return jax.tree.map(lambda leaf: leaf[None], result)

    spec = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(of_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), **kwargs
    )


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of pool, with a collective that shows whether its channels are intact.

    Attributes:
      name: for the test's id.
      pool: makes the pool.
      call: the collective, inside ``shard_map``: an array to an array of the same shape.
      expected: what ``call`` gives on each device for the stacked messages, bit for bit.
      message: the bytes that ``call`` sends to a peer for so many fp32 elements, of two ranks.
    """

    name: str
    pool: Callable[..., Any]
    call: Callable[[Any, Any], Any]
    expected: Callable[[Any, int], np.ndarray]
    message: Callable[[int], int]


def rows_of_eight(x: Any) -> Any:
    """Any array as rows of eight, the last one filled up with zeros."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % 8)).reshape(-1, 8)


def sum_by_gather(x: Any, pool: Any) -> Any:
    """The sum in rank order, of what a gather brings."""
    parts = comm.dcp_gather_heads(rows_of_eight(x)[:, None], pool)
    total = parts[:, 0]
    for rank in range(1, pool.world_size):
        total = total + parts[:, rank]
    return total.reshape(-1)[: x.size].reshape(x.shape)


def mean_by_combine(x: Any, pool: Any) -> Any:
    """The mean in rank order: all shards weigh the same, and every head is the same."""
    rows = jnp.repeat(rows_of_eight(x)[:, None], pool.world_size, axis=1)
    out = comm.dcp_combine(rows, jnp.full(rows.shape[:2], 3.0), pool)
    return out.reshape(-1)[: x.size].reshape(x.shape)


def rank_order_mean(parts: Any, world_size: int) -> np.ndarray:
    """What ``mean_by_combine`` gives, where a division by the number of ranks is exact."""
    assert world_size in (2, 4, 8, 16)
    return rank_order_sum(np.asarray(parts) * np.float32(1 / world_size), world_size)


def _eights(elements: int) -> int:
    return -(-elements // 8)


def _combine_message(elements: int) -> int:
    rows = _eights(elements)
    return -(-16 * rows // 128) * 128 + 32 * rows


KINDS = (
    Kind("all_reduce", comm.ChannelPool, comm.all_reduce, rank_order_sum, lambda n: 4 * n),
    Kind("gather", comm.DcpPool, sum_by_gather, rank_order_sum, lambda n: 32 * _eights(n)),
    Kind("combine", comm.DcpPool, mean_by_combine, rank_order_mean, _combine_message),
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
