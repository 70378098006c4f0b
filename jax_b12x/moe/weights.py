"""``ExpertWeights``: the one owner of an MoE layer's packed expert weights and their scales."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_b12x.arguments import as_array, what
from jax_b12x.moe import layout_sm90
from jax_b12x.moe.recipe import WeightFormat
from jax_b12x.quant import QuantizedTensor, nvfp4

if TYPE_CHECKING:
    from jax_b12x.moe.plan import MoePlan

# How the bytes are laid out. "checkpoint" is what loaders give and CPU kernels read; a device
# layout is made from it by `ExpertWeights.prepare` and can be turned back.
WeightLayout = Literal["checkpoint", "sm90"]

# The order of w13's rows in arrays that come from elsewhere: all gate rows, then all up rows; the
# other way round; or gate and up rows in turn (GPT-OSS).
W13Order = Literal["gate_up", "up_gate", "interleaved"]

BLOCK: dict[WeightFormat, int] = {"nvfp4": 16, "mxfp4": 32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Packed weights of all experts of one layer, as a pytree.

    Two E2M1 codes a byte, the even column in the low nibble. ``block`` is 16 (``nvfp4``) or 32
    (``mxfp4``) columns along the reduction axis. A weight's value is ``e2m1(code) * scale(block) *
    global_scale``. In the ``checkpoint`` layout:

    Attributes:
      w13: ``uint8[num_experts, 2 * intermediate, hidden // 2]``; gate rows first, then up rows.
      w13_scale: ``float8_e4m3fn`` (nvfp4) or ``float8_e8m0fnu`` (mxfp4)
        ``[num_experts, 2 * intermediate, hidden // block]``.
      w13_global_scale: ``float32[num_experts, 2]``, for the gate rows and for the up rows; ones in
        mxfp4.
      w2: ``uint8[num_experts, hidden, intermediate // 2]``.
      w2_scale: ``[num_experts, hidden, intermediate // block]``, typed as ``w13_scale``.
      w2_global_scale: ``float32[num_experts]``; ones in mxfp4.
      w13_input_scale: ``float32[]``, the global scale of the NVFP4 layer input (``nvfp4`` recipe);
        1 if the checkpoint has none. Per-expert values of a checkpoint are joined by their maximum.
      w2_input_scale: ``float32[num_experts]``, the global scale of the NVFP4 intermediate; 1 if
        absent.
      w13_bias: ``float32[num_experts, 2 * intermediate]``, or ``[num_experts, 0]`` where there is
        none.
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

    def prepare(self, plan: MoePlan, *, donate: bool = False) -> ExpertWeights:
        """Returns these weights in the layout that ``plan`` reads; do it once, after loading.

        Repacking runs on the weights' device, a matrix after the other and an expert after the
        other, and needs the memory of one of the layer's two matrices beside the weights. Nothing
        is lost: :meth:`unprepare` gives the checkpoint's bytes back.

        Args:
          plan: any plan for these weights.
          donate: free this object's packed arrays as soon as they are repacked; it can't be used
            afterwards.

        Returns:
          The weights in ``plan.weight_layout``; ``self`` if they are in it already.

        Raises:
          TypeError: ``plan`` is no plan.
          ValueError: the plan is for other weights, or a block scale is negative or NaN, which the
            layout has no room for.
        """
        from jax_b12x.moe.plan import MoePlan  # which imports this module

        if not isinstance(plan, MoePlan):
            raise TypeError(f"plan is {what(plan)}; it must be a MoePlan, from jax_b12x.moe.plan")
        for name, own, planned in (
            ("hidden", self.hidden, plan.hidden),
            ("intermediate", self.intermediate, plan.intermediate),
            ("num_experts", self.num_experts, plan.num_experts),
            ("format", self.format, plan.weight_format),
        ):
            if own != planned:
                raise ValueError(f"{name} is {own!r}, but the plan was made for {planned!r}")
        if plan.weight_layout == self.layout:
            return self
        if self.layout != "checkpoint":
            checkpoint = self.unprepare()
            if donate:
                jax.block_until_ready(checkpoint)
                self.free()
            if plan.weight_layout == "checkpoint":
                return checkpoint
            return checkpoint.prepare(plan, donate=donate)
        repacked: dict[str, jax.Array] = {}
        for name, gated in (("w13", True), ("w2", False)):
            packed, scale = getattr(self, name), getattr(self, f"{name}_scale")
            check_block_scales(f"{name}_scale", scale)
            repacked[name] = layout_sm90.pack(packed, scale, gated=gated)
            repacked[f"{name}_scale"] = jnp.zeros((self.num_experts, 0), scale.dtype)
            if donate:
                jax.block_until_ready(repacked[name])
                packed.delete()
                scale.delete()
        return dataclasses.replace(self, layout="sm90", **repacked)  # type: ignore[arg-type]

    def free(self) -> None:
        """Frees the packed arrays and their block scales; the weights can't be used afterwards."""
        for array in (self.w13, self.w13_scale, self.w2, self.w2_scale):
            array.delete()

    def unprepare(self) -> ExpertWeights:
        """Returns these weights in the ``checkpoint`` layout, bit for bit as they were loaded."""
        if self.layout == "checkpoint":
            return self
        arrays: dict[str, jax.Array] = {}
        for name, rows, columns, gated in (
            ("w13", 2 * self.intermediate, self.hidden, True),
            ("w2", self.hidden, self.intermediate, False),
        ):
            arrays[name], arrays[f"{name}_scale"] = layout_sm90.unpack(
                getattr(self, name),
                rows=rows,
                columns=columns,
                gated=gated,
                scale_dtype=getattr(self, f"{name}_scale").dtype,
            )
        return dataclasses.replace(self, layout="checkpoint", **arrays)  # type: ignore[arg-type]

    @classmethod
    def from_arrays(
        cls,
        w13: ArrayLike,
        w13_scale: ArrayLike,
        w2: ArrayLike,
        w2_scale: ArrayLike,
        *,
        format: WeightFormat = "nvfp4",
        w13_global_scale: ArrayLike = 1.0,
        w2_global_scale: ArrayLike = 1.0,
        w13_input_scale: ArrayLike = 1.0,
        w2_input_scale: ArrayLike = 1.0,
        w13_bias: ArrayLike | None = None,
        w2_bias: ArrayLike | None = None,
        w13_order: W13Order = "gate_up",
    ) -> ExpertWeights:
        """Makes expert weights of packed arrays, after checking that they fit together.

        Values are checked of global scales alone: a block scale that is NaN makes NaN of what it
        multiplies.

        Args:
          w13: ``uint8[num_experts, 2 * intermediate, hidden // 2]``, even column in the low nibble.
          w13_scale: ``[num_experts, 2 * intermediate, hidden // block]``, ``float8_e4m3fn`` (nvfp4)
            or ``float8_e8m0fnu`` (mxfp4), or the bits of that as ``uint8``.
          w2: ``uint8[num_experts, hidden, intermediate // 2]``.
          w2_scale: ``[num_experts, hidden, intermediate // block]``, typed as ``w13_scale``.
          format: ``"nvfp4"`` (block 16) or ``"mxfp4"`` (block 32).
          w13_global_scale: a number, ``f32[num_experts]``, or ``f32[num_experts, 2]`` for gate and
            up, in that order whatever ``w13_order`` is. It multiplies.
          w2_global_scale: a number or ``f32[num_experts]``.
          w13_input_scale: the global scale of the layer's NVFP4 input.
          w2_input_scale: a number or ``f32[num_experts]``, the same for the intermediate.
          w13_bias: ``[num_experts, 2 * intermediate]``, rows ordered as those of ``w13``.
          w2_bias: ``[num_experts, hidden]``.
          w13_order: how the rows of ``w13``, ``w13_scale`` and ``w13_bias`` are ordered.

        Returns:
          The weights in the ``checkpoint`` layout.

        Raises:
          TypeError: an argument is no array.
          ValueError: a shape, dtype or scale is wrong; the message names the array.
        """
        if format not in BLOCK:
            raise ValueError(f"format is {format!r}; it must be 'nvfp4' or 'mxfp4'")
        if w13_order not in ("gate_up", "up_gate", "interleaved"):
            raise ValueError(
                f"w13_order is {w13_order!r}; it must be 'gate_up', 'up_gate' or 'interleaved'"
            )
        block = BLOCK[format]
        w13, w2 = _packed("w13", w13), _packed("w2", w2)
        num_experts, rows, hidden = w13.shape[0], w13.shape[1], 2 * w13.shape[2]
        intermediate = rows // 2
        if rows % 2:
            raise ValueError(f"w13 has shape {w13.shape}; its rows, gate and up, must be even")
        for name, columns in (("hidden", hidden), ("intermediate", intermediate)):
            if columns == 0 or columns % block:
                raise ValueError(
                    f"{name} is {columns}, from w13's shape {w13.shape}; {format} needs a "
                    f"positive multiple of {block}"
                )
        if num_experts == 0:
            raise ValueError(f"w13 has shape {w13.shape}; there must be 1 expert or more")
        _check_shape("w2", w2, (num_experts, hidden, intermediate // 2))
        w13_scale = _block_scale("w13_scale", w13_scale, format)
        w2_scale = _block_scale("w2_scale", w2_scale, format)
        _check_shape("w13_scale", w13_scale, (num_experts, rows, hidden // block))
        _check_shape("w2_scale", w2_scale, (num_experts, hidden, intermediate // block))
        gate_up_scale = as_array("w13_global_scale", w13_global_scale, jnp.float32)
        if gate_up_scale.ndim == 1:
            gate_up_scale = gate_up_scale[:, None]
        return cls(
            w13=_gate_rows_first(w13, w13_order),
            w13_scale=_gate_rows_first(w13_scale, w13_order),
            w13_global_scale=_scales("w13_global_scale", gate_up_scale, (num_experts, 2)),
            w2=w2,
            w2_scale=w2_scale,
            w2_global_scale=_scales("w2_global_scale", w2_global_scale, (num_experts,)),
            w13_input_scale=_scales("w13_input_scale", w13_input_scale, ()),
            w2_input_scale=_scales("w2_input_scale", w2_input_scale, (num_experts,)),
            w13_bias=_gate_rows_first(_bias("w13_bias", w13_bias, (num_experts, rows)), w13_order),
            w2_bias=_bias("w2_bias", w2_bias, (num_experts, hidden)),
            format=format,
            hidden=hidden,
            intermediate=intermediate,
        )

    @classmethod
    def quantize(
        cls,
        w_gate: ArrayLike,
        w_up: ArrayLike,
        w_down: ArrayLike,
        *,
        w13_input_scale: ArrayLike = 1.0,
        w2_input_scale: ArrayLike = 1.0,
        w13_bias: ArrayLike | None = None,
        w2_bias: ArrayLike | None = None,
    ) -> ExpertWeights:
        """Quantizes dense weights to NVFP4, with a global scale for each expert and projection.

        A global scale is ``amax / (6 * 448)`` of its matrix. Weights are as ``torch.nn.Linear`` and
        checkpoints have them: ``[outputs, inputs]``. It can be traced by ``jit``.

        NVFP4 has no infinity. Weights that are infinite or NaN are refused; under ``jit``, where
        there is no looking at them, each becomes NaN with all of its block of 16.

        Args:
          w_gate: ``f32|bf16|f16[num_experts, intermediate, hidden]``.
          w_up: the same shape.
          w_down: ``[num_experts, hidden, intermediate]``.
          w13_input_scale: the global scale of the layer's NVFP4 input, ``amax / 2688`` of what will
            come. In recipe ``nvfp4``, blocks of 16 below 0.006 times it become zero and magnitudes
            above 2,688 times it are cut off; other recipes do not read it.
          w2_input_scale: a number or ``f32[num_experts]``, the same for the intermediate.
          w13_bias: ``[num_experts, 2 * intermediate]``, gate first.
          w2_bias: ``[num_experts, hidden]``.

        Returns:
          The weights in the ``checkpoint`` layout.

        Raises:
          TypeError: an argument is no array.
          ValueError: a shape or dtype is wrong, or a weight is infinite or NaN; the message names
            the array.
        """
        gate, up = as_array("w_gate", w_gate), as_array("w_up", w_up)
        down = as_array("w_down", w_down)
        for name, w in (("w_gate", gate), ("w_up", up), ("w_down", down)):
            if w.dtype.name not in ("float32", "bfloat16", "float16"):
                raise ValueError(
                    f"{name} has dtype {w.dtype.name}; it must be float32, bfloat16 or float16"
                )
        if gate.ndim != 3:
            raise ValueError(
                f"w_gate has shape {gate.shape}; it must be [num_experts, intermediate, hidden]"
            )
        num_experts, intermediate, hidden = gate.shape
        if num_experts == 0:
            raise ValueError(f"w_gate has shape {gate.shape}; there must be 1 expert or more")
        _check_shape("w_up", up, gate.shape)
        _check_shape("w_down", down, (num_experts, hidden, intermediate))
        for name, columns in (("hidden", hidden), ("intermediate", intermediate)):
            if columns == 0 or columns % nvfp4.BLOCK:
                raise ValueError(
                    f"{name} is {columns}, from w_gate's {gate.shape}; nvfp4 needs a positive "
                    f"multiple of {nvfp4.BLOCK}"
                )
        (q_gate, g_gate), (q_up, g_up), (q_down, g_down) = (
            _quantize_experts(name, w)
            for name, w in (("w_gate", gate), ("w_up", up), ("w_down", down))
        )
        return cls.from_arrays(
            jnp.concatenate([q_gate.data, q_up.data], axis=1),
            jnp.concatenate([q_gate.scale, q_up.scale], axis=1),
            q_down.data,
            q_down.scale,
            w13_global_scale=jnp.stack([g_gate, g_up], axis=1),
            w2_global_scale=g_down,
            w13_input_scale=w13_input_scale,
            w2_input_scale=w2_input_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )


def _quantize_experts(name: str, w: jax.Array) -> tuple[QuantizedTensor, jax.Array]:
    """Quantizes dense matrices, with a global scale for each expert."""
    # Not from the largest magnitude: XLA's maximum may pass over a NaN.
    finite = jnp.isfinite(w)
    good = jnp.all(finite, axis=(1, 2))
    if isinstance(good, jax.core.Tracer):
        amax = jnp.max(jnp.where(finite, jnp.abs(w), 0), axis=(1, 2))
        w = jnp.where(finite, w, jnp.nan)
    elif bool(jnp.all(good)):
        amax = jnp.max(jnp.abs(w), axis=(1, 2))
    else:
        raise ValueError(
            f"{name} of expert {int(jnp.argmin(good))} holds a weight that is infinite or NaN; "
            "weights must be finite"
        )
    g = nvfp4.global_scale(amax)
    return nvfp4.quantize(w, g[:, None]), g


def _check_shape(name: str, array: jax.Array, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} has shape {array.shape}; the other arrays need {expected}")


def _packed(name: str, array: ArrayLike) -> jax.Array:
    array = as_array(name, array)
    if array.dtype != jnp.uint8:
        raise ValueError(f"{name} has dtype {array.dtype.name}; packed weights are uint8")
    if array.ndim != 3:
        raise ValueError(
            f"{name} has shape {array.shape}; it must be [num_experts, rows, columns // 2]"
        )
    return array


def _block_scale(name: str, array: ArrayLike, format: WeightFormat) -> jax.Array:
    array = as_array(name, array)
    dtype = jnp.float8_e4m3fn if format == "nvfp4" else jnp.float8_e8m0fnu
    if array.dtype == jnp.uint8:
        return lax.bitcast_convert_type(array, dtype)
    if array.dtype != dtype:
        raise ValueError(
            f"{name} has dtype {array.dtype.name}; {format} block scales are "
            f"{jnp.dtype(dtype).name}, or its bits as uint8"
        )
    return array


def check_block_scales(name: str, scale: jax.Array) -> None:
    """Refuses block scales that are negative or NaN; there is no looking while tracing."""
    if isinstance(scale, jax.core.Tracer):
        return
    bits = lax.bitcast_convert_type(scale, jnp.uint8)
    bad = bits == 255 if scale.dtype == jnp.float8_e8m0fnu else bits >= 127
    if bool(jnp.any(bad)):
        expert = int(jnp.argmax(jnp.any(bad, axis=(1, 2))))
        raise ValueError(
            f"{name} of expert {expert} holds a block scale that is negative or NaN; block scales "
            "must be numbers from 0"
        )


def _scales(name: str, value: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    scales = as_array(name, value, jnp.float32)
    try:
        scales = jnp.broadcast_to(scales, shape)
    except ValueError:
        raise ValueError(f"{name} has shape {scales.shape}; it must be {shape}") from None
    if not isinstance(scales, jax.core.Tracer):
        bad = np.asarray(scales)[~(np.isfinite(scales) & (np.asarray(scales) > 0))]
        if bad.size:
            raise ValueError(f"{name} holds {bad[0]}; scales must be positive and finite")
    return scales


def _bias(name: str, value: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array:
    if value is None:
        return jnp.zeros((shape[0], 0), jnp.float32)
    bias = as_array(name, value)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {bias.dtype.name}; it must be a floating-point dtype")
    _check_shape(name, bias, shape)
    return bias.astype(jnp.float32)


def _gate_rows_first(array: jax.Array, order: W13Order) -> jax.Array:
    if order == "gate_up" or array.shape[1] == 0:
        return array
    if order == "up_gate":
        up, gate = jnp.split(array, 2, axis=1)
        return jnp.concatenate([gate, up], axis=1)
    return jnp.concatenate([array[:, 0::2], array[:, 1::2]], axis=1)
