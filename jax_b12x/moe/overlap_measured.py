"""What a shared expert costs beside fused and split decode, and joined to the routed experts.

``layer_plan.py`` looks here, on the device that was measured (an H200): recipes that quantize
activations go by it for fused or split decode, a packed shared expert for whether it is joined.
``python -m jax_b12x bench layer`` measures; a shape that is not here counts as not measured: it is
launched fused, and joined where that is possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_b12x.capability import DeviceCapability


@dataclasses.dataclass(frozen=True)
class OverlapCase:
    """What was measured: one layer on one device, from the routed ids to the sum.

    Attributes:
      recipe: of the routed experts.
      hidden: columns of ``x``.
      intermediate: of a routed expert, on the device.
      num_experts: routed experts on the device.
      top_k: routes a token.
      shared_format: ``"dense"`` or ``"nvfp4"``.
      shared_intermediate: of the shared expert, on the device.
    """

    recipe: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared_format: str
    shared_intermediate: int


@dataclasses.dataclass(frozen=True)
class OverlapTimes:
    """The medians of one case and number of tokens, in µs.

    Attributes:
      fused: shared and routed experts with fused decode, overlapped as far as that allows.
      split: with split decode, the shared expert beside it.
      date: when, ISO 8601.
      joined: with the shared expert among the routed ones; ``None`` where it cannot be.
    """

    fused: float
    split: float
    date: str
    joined: float | None = None


# By case, then by number of tokens; `tools/measured_overlap.py` writes it from
# `benchmarks/results/layer-*.json`.
MEASURED: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = {
    OverlapCase(
        recipe="nvfp4",
        hidden=4096,
        intermediate=1408,
        num_experts=128,
        top_k=8,
        shared_format="dense",
        shared_intermediate=1408,
    ): {
        1: OverlapTimes(fused=50.0, split=48.4, date="2026-11-30", joined=None),
        2: OverlapTimes(fused=71.1, split=71.2, date="2026-11-30", joined=None),
        4: OverlapTimes(fused=108.7, split=107.7, date="2026-11-30", joined=None),
        7: OverlapTimes(fused=157.1, split=154.0, date="2026-11-30", joined=None),
        8: OverlapTimes(fused=167.6, split=160.6, date="2026-11-30", joined=None),
    },
    OverlapCase(
        recipe="nvfp4",
        hidden=4096,
        intermediate=1408,
        num_experts=128,
        top_k=8,
        shared_format="nvfp4",
        shared_intermediate=1408,
    ): {
        1: OverlapTimes(fused=50.3, split=48.0, date="2026-11-30", joined=39.6),
        2: OverlapTimes(fused=75.5, split=71.9, date="2026-11-30", joined=63.8),
        4: OverlapTimes(fused=113.4, split=108.5, date="2026-11-30", joined=100.1),
        7: OverlapTimes(fused=161.7, split=156.4, date="2026-11-30", joined=146.8),
        8: OverlapTimes(fused=171.5, split=163.2, date="2026-11-30", joined=154.4),
    },
    OverlapCase(
        recipe="w4a16",
        hidden=4096,
        intermediate=1408,
        num_experts=128,
        top_k=8,
        shared_format="nvfp4",
        shared_intermediate=1408,
    ): {
        1: OverlapTimes(fused=48.6, split=46.2, date="2026-11-30", joined=38.4),
        2: OverlapTimes(fused=73.2, split=72.5, date="2026-11-30", joined=61.5),
        4: OverlapTimes(fused=109.9, split=107.6, date="2026-11-30", joined=98.5),
        7: OverlapTimes(fused=159.9, split=156.3, date="2026-11-30", joined=145.9),
        8: OverlapTimes(fused=166.6, split=162.7, date="2026-11-30", joined=153.6),
    },
}

_MEASURED_ON = (90, 132)  # sm, sm_count


def lookup(
    case: OverlapCase,
    num_tokens: int,
    device: DeviceCapability,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = MEASURED,
) -> tuple[int, OverlapTimes] | None:
    """Returns what was measured for as many tokens, or else for the next larger number.

    Returns:
      The number of tokens that was measured and its times; ``None`` where nothing was measured for
      just this case on such a device.
    """
    rows = _rows(case, device, measured)
    return min(
        ((tokens, times) for tokens, times in rows.items() if tokens >= num_tokens),
        key=lambda row: row[0],
        default=None,
    )


def joined_rows(
    case: OverlapCase,
    device: DeviceCapability,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = MEASURED,
) -> dict[int, OverlapTimes]:
    """Returns what was measured of a case with the shared expert joined, by number of tokens."""
    rows = _rows(case, device, measured)
    return {tokens: times for tokens, times in rows.items() if times.joined is not None}


def _rows(
    case: OverlapCase,
    device: DeviceCapability,
    measured: Mapping[OverlapCase, Mapping[int, OverlapTimes]],
) -> Mapping[int, OverlapTimes]:
    if (device.sm, device.sm_count) != _MEASURED_ON:
        return {}
    return measured.get(case, {})
