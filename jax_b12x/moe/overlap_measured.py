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
        1: OverlapTimes(fused=51.7, split=49.1, date="2026-11-30", joined=None),
        2: OverlapTimes(fused=75.2, split=73.8, date="2026-11-30", joined=None),
        4: OverlapTimes(fused=114.7, split=113.1, date="2026-11-30", joined=None),
        7: OverlapTimes(fused=167.4, split=164.8, date="2026-11-30", joined=None),
        8: OverlapTimes(fused=184.7, split=173.7, date="2026-11-30", joined=None),
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
        1: OverlapTimes(fused=51.1, split=50.0, date="2026-11-30", joined=40.0),
        2: OverlapTimes(fused=78.2, split=77.3, date="2026-11-30", joined=67.3),
        4: OverlapTimes(fused=120.8, split=118.5, date="2026-11-30", joined=107.2),
        7: OverlapTimes(fused=178.1, split=170.6, date="2026-11-30", joined=160.4),
        8: OverlapTimes(fused=190.1, split=180.4, date="2026-11-30", joined=167.6),
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
        1: OverlapTimes(fused=48.1, split=46.1, date="2026-11-30", joined=38.9),
        2: OverlapTimes(fused=73.0, split=70.6, date="2026-11-30", joined=61.9),
        4: OverlapTimes(fused=111.4, split=107.5, date="2026-11-30", joined=98.6),
        7: OverlapTimes(fused=159.1, split=157.4, date="2026-11-30", joined=146.8),
        8: OverlapTimes(fused=170.1, split=164.5, date="2026-11-30", joined=155.0),
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
