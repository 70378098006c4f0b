"""Collectives for decode, on channels that compiled executables own."""

from jax_b12x.comm.all_reduce import add_rms_norm, all_reduce, all_reduce_rms_norm
from jax_b12x.comm.dcp import dcp_combine, dcp_gather_heads, dcp_gather_pair
from jax_b12x.comm.dcp_attention import dcp_attention
from jax_b12x.comm.lease import ChannelRecord, Checkpoint
from jax_b12x.comm.memory import channel_bytes, required_bytes
from jax_b12x.comm.pool import ChannelError, ChannelPool, DcpPool, Pool, RollbackRefusedError
from jax_b12x.comm.primitives import TARGETS
from jax_b12x.comm.teardown import TeardownError, TeardownRefusedError
from jax_b12x.comm.transport import TransportError

__all__ = [
    "TARGETS",
    "ChannelError",
    "ChannelPool",
    "ChannelRecord",
    "Checkpoint",
    "DcpPool",
    "Pool",
    "RollbackRefusedError",
    "TeardownError",
    "TeardownRefusedError",
    "TransportError",
    "add_rms_norm",
    "all_reduce",
    "all_reduce_rms_norm",
    "channel_bytes",
    "dcp_attention",
    "dcp_combine",
    "dcp_gather_heads",
    "dcp_gather_pair",
    "required_bytes",
]
