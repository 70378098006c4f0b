"""The size from which XLA's collective is the faster one."""

from __future__ import annotations

from jax_b12x import config
from jax_b12x.comm import checks
from jax_b12x.comm.topology import Topology

# `python -m jax_b12x bench comm` on two H200s: one shot is 1.7 times faster than `lax.psum` at
# 4 MiB, 1.3 times at 8 MiB, and loses from 32 MiB on. What is left to gain above 4 MiB is not worth
# the memory that channels of that size take. With more ranks each sends its message more often.
# `bench dcp` says the same: a combine is 1.7 times as fast as `lax.all_to_all` at 4 MiB, a gather
# 2.1 times as fast as `lax.all_gather`; at 16 MiB 1.2 and 1.4 times.
_GPU_CUTOFF_OF_TWO_RANKS = 4 * 1024**2
_CPU_CUTOFF = 8 * 1024**2


def resolve(cutoff: int | str | None, topology: Topology) -> int:
    """Returns the cutoff in bytes.

    Args:
      cutoff: what the user of the pool said: bytes, a size such as ``"512KB"``, ``"auto"`` or
        ``None`` for the environment's.
      topology: the ranks.

    Raises:
      TypeError: it is neither a whole number nor a text.
      ValueError: it has another form.
    """
    if cutoff is None:
        cutoff = config.ONESHOT_MAX_SIZE.get()
        if cutoff is None:
            cutoff = "auto"
    if isinstance(cutoff, str):
        if cutoff == "auto":
            return _automatic(topology)
        try:
            return config.parse_size(cutoff)
        except ValueError:
            raise ValueError(
                f"cutoff={cutoff!r} is not understood; allowed: bytes, a size such as '512KB', or "
                "'auto'"
            ) from None
    return checks.integer("cutoff", cutoff, 0, "bytes")


def _automatic(topology: Topology) -> int:
    if topology.platform == "cpu":
        return _CPU_CUTOFF
    return _GPU_CUTOFF_OF_TWO_RANKS // max(1, topology.world_size - 1)
