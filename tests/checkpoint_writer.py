"""Writes expert weights in the layouts that loaders read, apart from the package's own writer."""

import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_b12x import moe
from jax_b12x.moe import ExpertWeights

DTYPES = {
    np.dtype(np.uint8): "U8",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}

PREFIX = "model.layers.3.mlp.experts"
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
COMPRESSED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    }
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}, "model_type": "gpt_oss"}


def write_file(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        start = len(data)
        data += np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_shards(folder, shards):
    """Writes one file for each mapping of ``shards``, and their index."""
    index = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, tensors)
        index.update(dict.fromkeys(tensors, name))
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))


def random_experts(rng, format="nvfp4", E=3, H=64, I=32, bias=False):  # noqa: E741
    """Expert weights whose every byte is random, with scales that have exact inverses."""
    block, codes = (16, 0x7F) if format == "nvfp4" else (32, 0xFF)

    def powers(*shape):
        return np.exp2(rng.integers(-9, 3, shape)).astype(np.float32)

    nvfp4 = {
        "w13_global_scale": powers(E, 2),
        "w2_global_scale": powers(E),
        "w13_input_scale": powers(),
        "w2_input_scale": powers(E),
    }
    biases = {
        "w13_bias": rng.standard_normal((E, 2 * I)).astype(ml_dtypes.bfloat16),
        "w2_bias": rng.standard_normal((E, H)).astype(ml_dtypes.bfloat16),
    }
    return ExpertWeights.from_arrays(
        rng.integers(0, 256, (E, 2 * I, H // 2), dtype=np.uint8),
        rng.integers(0, codes, (E, 2 * I, H // block), dtype=np.uint8),
        rng.integers(0, 256, (E, H, I // 2), dtype=np.uint8),
        rng.integers(0, codes, (E, H, I // block), dtype=np.uint8),
        format=format,
        **(nvfp4 if format == "nvfp4" else {}),
        **(biases if bias else {}),
    )


def rows_in(order, array):
    """Reorders canonical rows (axis 1, gate first) into the order of a checkpoint."""
    array = np.asarray(array)
    half = array.shape[1] // 2
    rows = np.arange(2 * half)
    order = {
        "gate_up": rows,
        "up_gate": np.roll(rows, half),
        "interleaved": rows.reshape(2, half).T.ravel(),
    }[order]
    return array[:, order]


PARTS = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
}


def per_expert(weights, prefix, convention="modelopt", names=("gate_proj", "up_proj", "down_proj")):
    w = {k: np.asarray(v) for k, v in vars(weights).items() if hasattr(v, "dtype")}
    half = weights.intermediate
    invert = (lambda v: v) if convention == "modelopt" else (lambda v: np.reshape(1 / v, 1))
    out = {}
    for e in range(weights.num_experts):
        for i, name in enumerate(names):
            rows = [slice(half), slice(half, None), slice(None)][i]
            key = "w2" if i == 2 else "w13"
            g = w["w2_global_scale"][e] if i == 2 else w["w13_global_scale"][e, i]
            inputs = w["w2_input_scale"][e] if i == 2 else w["w13_input_scale"]
            values = (w[key][e, rows], w[f"{key}_scale"][e, rows], invert(g), invert(inputs))
            for part, value in zip(PARTS[convention], values, strict=True):
                out[f"{prefix}.{e}.{name}.{part}"] = np.asarray(value)
    return out


def stacked(weights, prefix, convention="modelopt", order="gate_up", sep="_", w13="gate_up_proj"):
    w = {k: np.asarray(v) for k, v in vars(weights).items() if hasattr(v, "dtype")}
    invert = (lambda v: v) if convention == "modelopt" else (lambda v: 1 / v)
    out = {}
    for key, name in (("w13", w13), ("w2", "w2" if w13 == "w13" else "down_proj")):
        reorder = (lambda v: rows_in(order, v)) if key == "w13" else np.asarray
        inputs = np.broadcast_to(w[f"{key}_input_scale"], weights.num_experts)
        values = (
            reorder(w[key]),
            reorder(w[f"{key}_scale"]),
            invert(w[f"{key}_global_scale"]),
            invert(inputs),
        )
        for part, value in zip(PARTS[convention], values, strict=True):
            out[f"{prefix}.{name}{sep}{part}"] = value
        if w[f"{key}_bias"].shape[1]:
            bias = reorder(w[f"{key}_bias"]).astype(ml_dtypes.bfloat16)
            out[f"{prefix}.{name}{sep}bias"] = bias
    return out


def gpt_oss(weights, prefix):
    out = {}
    for key, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        reorder = (lambda v: rows_in("interleaved", v)) if key == "w13" else np.asarray
        packed = reorder(getattr(weights, key))
        out[f"{prefix}.{name}_blocks"] = packed.reshape(*packed.shape[:2], -1, 16)
        out[f"{prefix}.{name}_scales"] = reorder(getattr(weights, f"{key}_scale")).view(np.uint8)
        bias = reorder(getattr(weights, f"{key}_bias"))
        out[f"{prefix}.{name}_bias"] = bias.astype(ml_dtypes.bfloat16)
    return out


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def check(a, b):
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

    jax.tree.map(check, actual, expected)


def write(folder, tensors, config=None):
    write_file(folder / "model.safetensors", tensors)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def fails(folder, message, prefix=PREFIX, **arguments):
    with pytest.raises(moe.CheckpointError, match=message) as caught:
        moe.load_experts(folder, prefix, **arguments)
    assert "safetensors" in str(caught.value) or str(folder) in str(caught.value)


def first(tensors, *words):
    return next(name for name in tensors if all(word in name for word in words))
