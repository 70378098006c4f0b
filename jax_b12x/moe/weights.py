"""``ExpertWeights``: the one owner of an MoE layer's packed expert weights and their scales."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jax_b12x.moe.recipe import WeightFormat

# How the bytes are laid out. "checkpoint" is what loaders give and CPU kernels read; a device layout is
# made from it by `ExpertWeights.prepare` and can be turned back.
WeightLayout = Literal["checkpoint", "sm90"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Packed weights of all experts of one layer, as a pytree.

    Two E2M1 codes a byte, the even column in the low nibble. ``block`` is 16 (``nvfp4``) or 32 (``mxfp4``)
    columns along the reduction axis. A weight's value is ``e2m1(code) * scale(block) * global_scale``. In the
    ``checkpoint`` layout:

    Attributes:
      w13: ``uint8[num_experts, 2 * intermediate, hidden // 2]``; gate rows first, then up rows.
      w13_scale: ``float8_e4m3fn`` (nvfp4) or ``float8_e8m0fnu`` (mxfp4)
        ``[num_experts, 2 * intermediate, hidden // block]``.
      w13_global_scale: ``float32[num_experts, 2]``, for the gate rows and for the up rows; ones in mxfp4.
      w2: ``uint8[num_experts, hidden, intermediate // 2]``.
      w2_scale: ``[num_experts, hidden, intermediate // block]``, typed as ``w13_scale``.
      w2_global_scale: ``float32[num_experts]``; ones in mxfp4.
      w13_input_scale: ``float32[]``, the global scale of the NVFP4 layer input (``nvfp4`` recipe); 1 if the
        checkpoint has none. Per-expert values of a checkpoint are joined by their maximum.
      w2_input_scale: ``float32[num_experts]``, the global scale of the NVFP4 intermediate; 1 if absent.
      w13_bias: ``float32[num_experts, 2 * intermediate]``, or ``[num_experts, 0]`` where there is none.
      w2_bias: ``float32[num_experts, hidden]``, or ``[num_experts, 0]``.
      format: ``"nvfp4"`` or ``"mxfp4"``.
      hidden: columns of w13, rows of w2, of the model (before a layout's padding).
      intermediate: columns of w2, of the model (before a layout's padding).
      layout: how the arrays are laid out.
    """

    w13: jax.Array
    w13_scale: jax.Array
    w13_global_scale: jax.Array
    w2: jax.Array
    w2_scale: jax.Array
    w2_global_scale: jax.Array
    w13_input_scale: jax.Array
    w2_input_scale: jax.Array
    w13_bias: jax.Array
    w2_bias: jax.Array
    format: WeightFormat = dataclasses.field(metadata={"static": True})
    hidden: int = dataclasses.field(metadata={"static": True})
    intermediate: int = dataclasses.field(metadata={"static": True})
    layout: WeightLayout = dataclasses.field(default="checkpoint", metadata={"static": True})

    @property
    def num_experts(self) -> int:
        """How many experts this holds."""
        return int(self.w13_global_scale.shape[0])
