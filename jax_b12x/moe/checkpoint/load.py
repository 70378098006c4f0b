"""``load_experts``: one MoE layer of a checkpoint, expert by expert, into packed arrays."""

from __future__ import annotations

import os
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from jax_b12x.moe.checkpoint import layout as layouts
from jax_b12x.moe.checkpoint.files import Checkpoint
from jax_b12x.moe.checkpoint.layout import Layout, Part, Projection
from jax_b12x.moe.checkpoint.placement import Placement
from jax_b12x.moe.checkpoint.safetensors_file import DTYPES, Tensor
from jax_b12x.moe.recipe import WeightFormat
from jax_b12x.moe.weights import BLOCK, ExpertWeights, W13Order

_FLOATS = ("F32", "BF16", "F16")


def load_experts(
    checkpoint: Checkpoint | str | os.PathLike[str],
    prefix: str,
    *,
    w13_order: W13Order | None = None,
    device: jax.Device | Sharding | None = None,
) -> ExpertWeights:
    """Loads the experts of one MoE layer.

    The layout (ModelOpt NVFP4, compressed-tensors NVFP4, GPT-OSS MXFP4; a tensor for each expert or
    stacked) is recognised from the tensors and checked against ``config.json``. Weights are read
    one expert at a time into the packed arrays; nothing is dequantized. The activation is no part
    of them: :func:`activation_of` returns it.

    Args:
      checkpoint: an open checkpoint, or the path of a file or directory.
      prefix: the layer's experts, such as ``"model.layers.3.mlp.experts"``; :func:`list_moe_layers`
        gives those there are.
      w13_order: the order of the rows where gate and up share a tensor. Left out: interleaved for
        MXFP4 and for models whose ``model_type`` is ``gpt_oss``, else gate first. Where gate and up
        are tensors of their own it can't be another than gate first.
      device: a device, or a sharding for every array whose first axis is experts. A
        ``NamedSharding`` may split that axis, as ``NamedSharding(mesh, P("ep"))`` does;
        ``w13_input_scale``, a scalar, is then replicated on its mesh. Left out: JAX's default
        device.

    Returns:
      The weights in the ``checkpoint`` layout.

    Raises:
      CheckpointError: the checkpoint is damaged, incomplete, inconsistent or in a layout that is
        not known; the message names the tensor and the file.
      TypeError, ValueError: another argument is wrong; the message names it.
    """
    if not isinstance(prefix, str):
        raise TypeError(
            f"prefix is {prefix!r}; it must be a name such as 'model.layers.3.mlp.experts': "
            "list_moe_layers gives those there are"
        )
    placement = Placement(device)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    found = layouts.find_layout(checkpoint, prefix)
    config = layouts.check_config(checkpoint, found)
    if w13_order is None:
        oai = found.convention == "mxfp4" or config.get("model_type") == "gpt_oss"
        w13_order = "interleaved" if oai and found.fused else "gate_up"
    elif w13_order not in ("gate_up", "up_gate", "interleaved"):
        raise ValueError(
            f"w13_order is {w13_order!r}; it must be 'gate_up', 'up_gate' or 'interleaved'"
        )
    elif w13_order != "gate_up" and not found.fused:
        raise ValueError(
            f"w13_order is {w13_order!r}; leave it out: gate and up are tensors of their own under "
            f"{prefix}, and their names already tell which is which"
        )
    loader = _Loader(found, w13_order)
    layouts.check_sizes(checkpoint, found, config, loader.hidden, loader.intermediate)
    return loader.load(placement)


class _Loader:
    """Fills the arrays of one layer."""

    def __init__(self, layout: Layout, w13_order: W13Order) -> None:
        self.layout = layout
        self.order = w13_order
        self.format: WeightFormat = "mxfp4" if layout.convention == "mxfp4" else "nvfp4"
        self.block = BLOCK[self.format]
        self._measure()
        self._check_tensors()

    def _measure(self) -> None:
        """Takes hidden and intermediate from the first weight of w13."""
        first = self.layout.get(self.layout.experts[0], self.layout.first_projections[0], "weight")
        shape = first.shape[1:] if self.layout.stacked else first.shape
        packed_rank = 3 if self.format == "mxfp4" else 2
        if len(shape) != packed_rank or (packed_rank == 3 and shape[2] != 16):
            raise first.error(
                f"an expert's weight must be {self._shape_words()}, stacked or not, in this layout"
            )
        rows = shape[0]
        if self.layout.fused and rows % 2:
            raise first.error("gate and up share its rows, which must be even")
        self.intermediate = rows // 2 if self.layout.fused else rows
        self.hidden = shape[1] * (32 if packed_rank == 3 else 2)
        for name, columns in (("hidden", self.hidden), ("intermediate", self.intermediate)):
            if columns == 0 or columns % self.block:
                raise first.error(
                    f"{name} is {columns}; {self.format} needs a multiple of {self.block}"
                )

    def _shape_words(self) -> str:
        return "[rows, columns / 32, 16]" if self.format == "mxfp4" else "[rows, columns / 2]"

    def _matrix(self, projection: Projection) -> tuple[int, int]:
        """Rows and columns of an expert's projection."""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate * (2 if projection == "gate_up" else 1), self.hidden

    def _check_tensors(self) -> None:
        """Checks that every tensor is there, with the dtype and shape that the others imply."""
        layout = self.layout
        required: tuple[Part, ...] = ("weight", "scale")
        if self.format == "nvfp4":
            required += ("global_scale",)
        for projections in (layout.first_projections, ("down",)):
            for part in required:
                for expert in layout.experts:
                    for projection in projections:
                        layout.get(expert, projection, part)
        for (_, projection, part), tensor in layout.tensors.items():
            rows, columns = self._matrix(projection)
            if part == "weight":
                packed = (columns // 32, 16) if self.format == "mxfp4" else (columns // 2,)
                self._expect(tensor, ("U8",), (rows, *packed))
            elif part == "scale":
                dtypes = ("F8_E4M3",) if self.format == "nvfp4" else ("U8", "F8_E8M0")
                self._expect(tensor, dtypes, (rows, columns // self.block))
            elif part == "bias":
                self._expect(tensor, _FLOATS, (rows,))
            elif tensor.dtype != "F32":
                raise tensor.error("its dtype must be F32")

    def _expect(self, tensor: Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        if self.layout.stacked:
            shape = (self.layout.num_experts, *shape)
        if tensor.dtype not in dtypes:
            raise tensor.error(f"its dtype must be {' or '.join(dtypes)}")
        if tensor.shape != shape:
            raise tensor.error(
                f"its shape must be {list(shape)}, as hidden is {self.hidden}, intermediate "
                f"{self.intermediate} and there are {self.layout.num_experts} experts"
            )

    def load(self, placement: Placement) -> ExpertWeights:
        """Reads everything."""
        num_experts = self.layout.num_experts
        placement.check(num_experts)
        first = self.layout.first_projections
        float8 = ml_dtypes.float8_e4m3fn if self.format == "nvfp4" else ml_dtypes.float8_e8m0fnu
        arrays: dict[str, Any] = {}
        for name, projections, rows, columns in (
            ("w13", first, 2 * self.intermediate, self.hidden),
            ("w2", ("down",), self.hidden, self.intermediate),
        ):
            parts = tuple[Projection, ...](projections)
            packed = self._read_rows("weight", parts, rows, columns // 2)
            arrays[name] = placement.put(packed)
            del packed
            scale = self._read_rows("scale", parts, rows, columns // self.block).view(float8)
            arrays[f"{name}_scale"] = placement.put(scale)
            bias = self._read_bias(parts, rows)
            arrays[f"{name}_bias"] = placement.put(bias)
        w13_global, w2_global = (
            np.ones((num_experts, 2), np.float32),
            np.ones(num_experts, np.float32),
        )
        if self.format == "nvfp4":
            w13_global = self._read_halves("global_scale")
            w2_global = self._read_scalars("down", "global_scale", 1)[:, 0]
        w13_input, w2_input = np.float32(1), np.ones(num_experts, np.float32)
        if self._is_there("input_scale", first):
            w13_input = np.float32(np.max(self._read_halves("input_scale")))
        if self._is_there("input_scale", ("down",)):
            w2_input = self._read_scalars("down", "input_scale", 1)[:, 0]
        for name, value in (
            ("w13_global_scale", w13_global),
            ("w2_global_scale", w2_global),
            ("w13_input_scale", w13_input),
            ("w2_input_scale", w2_input),
        ):
            arrays[name] = placement.put(value)
        return ExpertWeights(
            **arrays, format=self.format, hidden=self.hidden, intermediate=self.intermediate
        )

    def _is_there(self, part: Part, projections: tuple[Projection, ...]) -> bool:
        """Tells whether an optional part is there for all experts.

        Raises:
          CheckpointError: it is there for some only.
        """
        layout = self.layout
        if not any((e, p, part) in layout.tensors for e in layout.experts for p in projections):
            return False
        for expert in layout.experts:
            for projection in projections:
                layout.get(expert, projection, part)
        return True

    def _read_rows(
        self, part: Part, projections: tuple[Projection, ...], rows: int, columns: int
    ) -> NDArray[np.uint8]:
        """Reads ``uint8[num_experts, rows, columns]``, one expert and projection at a time."""
        out = np.empty((self.layout.num_experts, rows, columns), np.uint8)
        height = rows // len(projections)
        for e in range(self.layout.num_experts):
            for i, projection in enumerate(projections):
                tensor = self.layout.get(None if self.layout.stacked else e, projection, part)
                target = out[e, i * height : (i + 1) * height]
                self._read_expert(tensor, e, projection, target)
                if part == "scale":
                    self._check_scale(tensor, e, target)
        return out

    def _read_expert(
        self, tensor: Tensor, expert: int, projection: Projection, out: NDArray[Any]
    ) -> None:
        """Reads one expert's rows, gate first."""
        offset = expert * out.size if self.layout.stacked else 0
        if projection != "gate_up" or self.order == "gate_up":
            tensor.read_into(out, offset)
            return
        rows = np.empty_like(out)
        tensor.read_into(rows, offset)
        half = len(out) // 2
        if self.order == "interleaved":
            out[:half], out[half:] = rows[0::2], rows[1::2]
        else:
            out[:half], out[half:] = rows[half:], rows[:half]

    def _check_scale(self, tensor: Tensor, expert: int, bits: NDArray[np.uint8]) -> None:
        if self.format == "nvfp4":
            nan, negative = (bits & 0x7F) == 0x7F, bits > 0x80
        else:
            nan, negative = bits == 0xFF, np.zeros_like(bits, np.bool_)
        for bad, word in ((nan, "NaN"), (negative, "negative")):
            if bad.any():
                row, column = np.argwhere(bad)[0]
                raise tensor.error(
                    f"the block scale of expert {expert} at row {row}, block {column} is {word}"
                )

    def _read_bias(self, projections: tuple[Projection, ...], rows: int) -> NDArray[np.float32]:
        num_experts = self.layout.num_experts
        if not self._is_there("bias", projections):
            return np.zeros((num_experts, 0), np.float32)
        out = np.empty((num_experts, rows), np.float32)
        height = rows // len(projections)
        for e in range(num_experts):
            for i, projection in enumerate(projections):
                tensor = self.layout.get(None if self.layout.stacked else e, projection, "bias")
                values = np.empty(height, DTYPES[tensor.dtype])
                self._read_expert(tensor, e, projection, values)
                out[e, i * height : (i + 1) * height] = values
        return out

    def _read_halves(self, part: Part) -> NDArray[np.float32]:
        """Reads ``f32[num_experts, 2]``: a scale for gate and one for up."""
        if self.layout.fused:
            return self._read_scalars("gate_up", part, 2)
        return np.concatenate(
            [self._read_scalars(projection, part, 1) for projection in ("gate", "up")], axis=1
        )

    def _read_scalars(self, projection: Projection, part: Part, width: int) -> NDArray[np.float32]:
        """Reads ``f32[num_experts, width]`` scales that multiply."""
        layout = self.layout
        if layout.stacked:
            tensor = layout.get(None, projection, part)
            return self._scales(tensor, layout.num_experts, width)
        return np.concatenate(
            [self._scales(layout.get(e, projection, part), 1, width) for e in layout.experts]
        )

    def _scales(self, tensor: Tensor, experts: int, width: int) -> NDArray[np.float32]:
        squeezed = tuple(n for n in tensor.shape if n != 1)
        allowed = {(): (1, 1), (experts,): (experts, 1), (experts, width): (experts, width)}
        if experts == 1:
            allowed[(width,)] = (1, width)
        if squeezed not in allowed:
            raise tensor.error(
                f"its shape must be [], [{experts}]" + (f" or [{experts}, 2]" if width == 2 else "")
            )
        values = tensor.read().astype(np.float32, copy=False)
        with np.errstate(divide="ignore", over="ignore"):
            scales = values if self.layout.convention == "modelopt" else np.float32(1) / values
        usable = np.isfinite(scales) & np.isfinite(values) & (scales >= np.float32(2.0**-126))
        if not usable.all():
            raise tensor.error(
                f"holds {values[~usable].ravel()[0]}; scales must be positive, finite and not "
                "subnormal"
            )
        return np.array(np.broadcast_to(scales.reshape(allowed[squeezed]), (experts, width)))
