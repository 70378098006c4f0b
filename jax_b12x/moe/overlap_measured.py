"""Where split decode beside the shared expert was measured to win over fused decode.

``layer_plan.py`` looks here, for recipes that quantize activations, on the device that was measured
(an H200). ``python -m jax_b12x bench layer`` measures; a shape that is not here counts as not
measured, and is launched fused.
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
    """

    fused: float
    split: float
    date: str


# By case, then by number of tokens.
MEASURED: Mapping[OverlapCase, Mapping[int, OverlapTimes]] = {}

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
    if (device.sm, device.sm_count) != _MEASURED_ON:
        return None
    rows = measured.get(case, {})
    return min(
        ((tokens, times) for tokens, times in rows.items() if tokens >= num_tokens),
        key=lambda row: row[0],
        default=None,
    )
