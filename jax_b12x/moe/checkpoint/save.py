"""``save_experts``: writes NVFP4 experts, and the rest of a model, in ModelOpt's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

import jax_b12x
from jax_b12x.moe.checkpoint import safetensors_file
from jax_b12x.moe.checkpoint.files import INDEX
from jax_b12x.moe.weights import ExpertWeights
from jax_b12x.quant import nvfp4

_FILE = "model.safetensors"


def save_experts(
    path: str | os.PathLike[str],
    experts: Mapping[str, ExpertWeights],
    *,
    tensors: Mapping[str, ArrayLike] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Saves MoE layers as NVIDIA ModelOpt does: a tensor for each expert, projection and part.

    Writes ``model.safetensors``, ``config.json`` and ``hf_quant_config.json`` in the place of those
    of an earlier call: save all layers at once. Loading what was saved gives the same bits.

    Args:
      path: a directory, made if need be.
      experts: the layers' weights (``nvfp4``, ``checkpoint`` layout) by prefix, such as
        ``"model.layers.3.mlp.experts"``.
      tensors: the model's other tensors by name, stored as they are.
      config: further items of ``config.json``.

    Raises:
      TypeError: ``experts`` is no mapping of names to :class:`ExpertWeights`.
      ValueError: the weights are not NVFP4 in the ``checkpoint`` layout; two tensors have one name;
        or the directory holds other shards, which the new file would contradict.
      CheckpointError: a tensor's dtype cannot be stored.
    """
    if not isinstance(experts, Mapping):
        raise TypeError(
            f"experts is of type {type(experts).__name__}; it must be a mapping of prefixes to "
            "ExpertWeights, such as {'model.layers.3.mlp.experts': weights}"
        )
    for prefix, weights in experts.items():
        if not isinstance(prefix, str) or not isinstance(weights, ExpertWeights):
            raise TypeError(
                f"experts has {type(weights).__name__} under {prefix!r}; it must be a mapping of "
                "prefixes, such as 'model.layers.3.mlp.experts', to ExpertWeights"
            )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    strangers = [f.name for f in folder.glob("*.safetensors") if f.name != _FILE]
    strangers += [INDEX] if (folder / INDEX).exists() else []
    if strangers:
        raise ValueError(f"{folder} holds another checkpoint: {strangers[0]}")
    arrays = {name: np.asarray(value) for name, value in (tensors or {}).items()}
    excluded = [name[: -len(".weight")] for name in arrays if name.endswith(".weight")]
    for prefix, weights in experts.items():
        for name, array in _expert_tensors(prefix, weights).items():
            if name in arrays:
                raise ValueError(f"tensors has {name}, which is a tensor of the experts")
            arrays[name] = array
    producer = {"name": "jax_b12x", "version": jax_b12x.__version__}
    scheme = {"quant_algo": "NVFP4", "group_size": nvfp4.BLOCK}
    safetensors_file.write(folder / _FILE, arrays, {"format": "np"})
    _write_json(
        folder / "config.json",
        {
            **(config or {}),
            "quantization_config": {
                "quant_method": "modelopt",
                **scheme,
                "ignore": excluded,
                "producer": producer,
            },
        },
    )
    quantization = {**scheme, "kv_cache_quant_algo": None, "exclude_modules": excluded}
    _write_json(
        folder / "hf_quant_config.json", {"producer": producer, "quantization": quantization}
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _expert_tensors(prefix: str, weights: ExpertWeights) -> dict[str, NDArray[Any]]:
    """Returns the tensors of one layer, as views of its arrays where those are on a CPU."""
    if weights.format != "nvfp4" or weights.layout != "checkpoint":
        raise ValueError(
            f"the experts {prefix} are {weights.format} in the {weights.layout} layout; ModelOpt's "
            "layout stores nvfp4, from the checkpoint layout"
        )
    w13, w13_scale = np.asarray(weights.w13), np.asarray(weights.w13_scale)
    w2, w2_scale = np.asarray(weights.w2), np.asarray(weights.w2_scale)
    w13_global, w2_global = (
        np.asarray(weights.w13_global_scale),
        np.asarray(weights.w2_global_scale),
    )
    w13_input, w2_input = np.asarray(weights.w13_input_scale), np.asarray(weights.w2_input_scale)
    w13_bias, w2_bias = np.asarray(weights.w13_bias), np.asarray(weights.w2_bias)
    half = weights.intermediate
    out: dict[str, NDArray[Any]] = {}
    for e in range(weights.num_experts):
        for name, packed, scale, global_scale, input_scale, bias in (
            (
                "gate_proj",
                w13[e, :half],
                w13_scale[e, :half],
                w13_global[e, 0],
                w13_input,
                w13_bias[e, :half],
            ),
            (
                "up_proj",
                w13[e, half:],
                w13_scale[e, half:],
                w13_global[e, 1],
                w13_input,
                w13_bias[e, half:],
            ),
            ("down_proj", w2[e], w2_scale[e], w2_global[e], w2_input[e], w2_bias[e]),
        ):
            stem = f"{prefix}.{e}.{name}"
            out[f"{stem}.weight"] = packed
            out[f"{stem}.weight_scale"] = scale
            out[f"{stem}.weight_scale_2"] = np.asarray(global_scale)
            out[f"{stem}.input_scale"] = np.asarray(input_scale)
            if (w2_bias if name == "down_proj" else w13_bias).shape[1]:
                out[f"{stem}.bias"] = bias
    return out
