"""The devices that a benchmark over ranks runs on."""

from __future__ import annotations

import jax

from jax_b12x import capability


def devices(count: int, least: int = 1) -> list[jax.Device]:
    """Returns the first devices, as many as ``--ranks`` asks for.

    Raises:
      ValueError: it asks for fewer than ``least``, or for more than there are; says how a CPU gets
        more.
    """
    found = capability.devices()
    if least <= count <= len(found):
        return found[:count]
    if count < least:
        raise ValueError(f"--ranks is {count}; it must be {least} or more")
    hint = ""
    if found[0].platform == "cpu":
        hint = (
            "; to have more on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{count} and NPROC=64 in the environment"
        )
    devices = "1 device" if len(found) == 1 else f"{len(found)} devices"
    raise ValueError(f"--ranks is {count}; JAX sees {devices}{hint}")
