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
        1: OverlapTimes(fused=48.3, split=46.7, date="2026-11-30", joined=None),
        2: OverlapTimes(fused=71.4, split=70.1, date="2026-11-30", joined=None),
        3: OverlapTimes(fused=89.0, split=88.1, date="2026-11-30", joined=None),
        4: OverlapTimes(fused=107.0, split=106.7, date="2026-11-30", joined=None),
        5: OverlapTimes(fused=123.7, split=123.0, date="2026-11-30", joined=None),
        6: OverlapTimes(fused=137.9, split=136.8, date="2026-11-30", joined=None),
        7: OverlapTimes(fused=154.0, split=153.5, date="2026-11-30", joined=None),
        8: OverlapTimes(fused=165.8, split=159.6, date="2026-11-30", joined=None),
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
        1: OverlapTimes(fused=47.6, split=45.4, date="2026-11-30", joined=36.9),
        2: OverlapTimes(fused=70.0, split=69.5, date="2026-11-30", joined=59.1),
        3: OverlapTimes(fused=88.3, split=87.1, date="2026-11-30", joined=76.8),
        4: OverlapTimes(fused=106.5, split=106.0, date="2026-11-30", joined=95.0),
        5: OverlapTimes(fused=123.1, split=122.0, date="2026-11-30", joined=109.4),
        6: OverlapTimes(fused=138.3, split=136.9, date="2026-11-30", joined=125.0),
        7: OverlapTimes(fused=155.4, split=153.7, date="2026-11-30", joined=140.9),
        8: OverlapTimes(fused=161.8, split=160.1, date="2026-11-30", joined=146.2),
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
        1: OverlapTimes(fused=48.8, split=46.9, date="2026-11-30", joined=37.8),
        2: OverlapTimes(fused=75.7, split=72.2, date="2026-11-30", joined=62.8),
        3: OverlapTimes(fused=93.4, split=89.9, date="2026-11-30", joined=80.5),
        4: OverlapTimes(fused=112.7, split=108.5, date="2026-11-30", joined=98.7),
        5: OverlapTimes(fused=129.0, split=125.3, date="2026-11-30", joined=114.2),
        6: OverlapTimes(fused=143.4, split=139.7, date="2026-11-30", joined=129.0),
        7: OverlapTimes(fused=159.6, split=157.2, date="2026-11-30", joined=145.4),
        8: OverlapTimes(fused=168.8, split=163.5, date="2026-11-30", joined=151.1),
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
