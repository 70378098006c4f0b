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
        1: OverlapTimes(fused=47.8, split=46.0, date="2026-11-30", joined=None),
        2: OverlapTimes(fused=71.4, split=69.1, date="2026-11-30", joined=None),
        3: OverlapTimes(fused=89.2, split=86.5, date="2026-11-30", joined=None),
        4: OverlapTimes(fused=107.9, split=104.8, date="2026-11-30", joined=None),
        5: OverlapTimes(fused=124.6, split=120.7, date="2026-11-30", joined=None),
        6: OverlapTimes(fused=139.0, split=134.6, date="2026-11-30", joined=None),
        7: OverlapTimes(fused=156.4, split=151.3, date="2026-11-30", joined=None),
        8: OverlapTimes(fused=165.1, split=158.6, date="2026-11-30", joined=None),
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
        1: OverlapTimes(fused=45.8, split=45.4, date="2026-11-30", joined=36.5),
        2: OverlapTimes(fused=69.1, split=68.4, date="2026-11-30", joined=58.6),
        3: OverlapTimes(fused=87.7, split=86.1, date="2026-11-30", joined=76.2),
        4: OverlapTimes(fused=106.2, split=104.8, date="2026-11-30", joined=94.9),
        5: OverlapTimes(fused=122.4, split=120.1, date="2026-11-30", joined=109.6),
        6: OverlapTimes(fused=137.2, split=134.2, date="2026-11-30", joined=124.0),
        7: OverlapTimes(fused=154.7, split=152.3, date="2026-11-30", joined=140.9),
        8: OverlapTimes(fused=161.2, split=159.0, date="2026-11-30", joined=145.4),
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
        1: OverlapTimes(fused=47.6, split=45.5, date="2026-11-30", joined=37.9),
        2: OverlapTimes(fused=75.7, split=70.7, date="2026-11-30", joined=63.6),
        3: OverlapTimes(fused=93.4, split=88.0, date="2026-11-30", joined=81.3),
        4: OverlapTimes(fused=113.1, split=106.5, date="2026-11-30", joined=99.9),
        5: OverlapTimes(fused=130.1, split=124.0, date="2026-11-30", joined=116.7),
        6: OverlapTimes(fused=145.0, split=137.4, date="2026-11-30", joined=131.3),
        7: OverlapTimes(fused=161.8, split=153.6, date="2026-11-30", joined=147.1),
        8: OverlapTimes(fused=167.6, split=160.9, date="2026-11-30", joined=151.0),
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
