"""Checkpoints: bfloat16 as training writes it, and the NVFP4 one that ships.

Dense parameters are named by their path in the model. In the NVFP4 checkpoint the routed experts
are in ModelOpt's layout and names, as in `nvidia/*-NVFP4` models, read and written by
`jax_b12x.moe`.
"""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from examples.flax_moe.config import ModelConfig
from examples.flax_moe.model import Decoder
from jax_b12x import moe
from jax_b12x.flax import PackedExperts
from jax_b12x.moe.recipe import RecipeName

# How a model came to be: command, date, device, losses.
Record = dict[str, object]

SHARD_BYTES = 15_000_000
SHIPPED = pathlib.Path(__file__).parent / "checkpoint"
EXPERTS = "model.layers.{layer}.mlp.experts"


def flatten(params: nnx.State) -> dict[str, jax.Array]:
    """Returns the arrays by dotted path, such as ``blocks.0.moe.router.kernel``."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(params))[0]
    }


def unflatten(params: nnx.State, arrays: dict[str, np.ndarray]) -> nnx.State:
    """Returns ``params`` with every array replaced by the one of its path, cast to its dtype.

    Raises:
      ValueError: a path is missing, unknown, or has another shape.
    """
    flat = flatten(params)
    if set(flat) != set(arrays):
        raise ValueError(
            f"the checkpoint lacks {sorted(set(flat) - set(arrays))} and has the unknown "
            f"{sorted(set(arrays) - set(flat))}"
        )
    for path, leaf in flat.items():
        if leaf.shape != arrays[path].shape:
            raise ValueError(f"{path} has shape {arrays[path].shape}; it must be {leaf.shape}")
    treedef = jax.tree.structure(params)
    leaves = [jnp.asarray(arrays[path], leaf.dtype) for path, leaf in flat.items()]
    return jax.tree.unflatten(treedef, leaves)


def save_bf16(folder: pathlib.Path, config: ModelConfig, params: nnx.State, record: Record) -> None:
    """Writes the parameters as bfloat16 in shards, and shape and record to ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for path, leaf in flatten(params).items():
        array = np.asarray(leaf.astype(jnp.bfloat16))
        if size + array.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][path] = array
        size += array.nbytes
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"bf16-{i + 1:05d}-of-{len(shards):05d}.safetensors")
    config_json = {"model": config.to_json(), "training": record}
    (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")


def is_expert(path: str) -> bool:
    """Returns whether a parameter belongs to the routed experts."""
    return ".moe.experts." in path


def load_bf16(folder: pathlib.Path) -> tuple[ModelConfig, dict[str, np.ndarray], Record]:
    """Reads what :func:`save_bf16` wrote: the shape, the arrays by path, and the record.

    Raises:
      FileNotFoundError: the folder holds no such checkpoint.
    """
    arrays: dict[str, np.ndarray] = {}
    for shard in sorted(folder.glob("bf16-*.safetensors")):
        arrays.update(load_file(shard))
    if not arrays:
        raise FileNotFoundError(f"{folder} holds no bf16-*.safetensors")
    config_json = json.loads((folder / "config.json").read_text())
    return ModelConfig.from_json(config_json["model"]), arrays, config_json["training"]


def save_quantized(
    folder: pathlib.Path,
    config: ModelConfig,
    dense: dict[str, jax.Array],
    experts: list[moe.ExpertWeights],
    record: Record,
) -> int:
    """Writes the NVFP4 checkpoint in ModelOpt's layout; returns its size in bytes.

    Args:
      folder: a directory, made if need be.
      config: the shape of the model.
      dense: everything but the routed experts, by path; stored in bfloat16.
      experts: the routed experts of each layer.
      record: of the training.
    """
    moe.save_experts(
        folder,
        {EXPERTS.format(layer=layer): weights for layer, weights in enumerate(experts)},
        tensors={path: array.astype(jnp.bfloat16) for path, array in dense.items()},
        config={"model": config.to_json(), "training": record},
    )
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def load_quantized(
    folder: pathlib.Path,
    *,
    recipe: RecipeName = "nvfp4",
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Decoder, Record]:
    """Loads the NVFP4 checkpoint, with packed experts as they are.

    Args:
      folder: of the checkpoint.
      recipe: what the experts compute in.
      dtype: what everything else is computed in; by default bfloat16 on GPUs, whose expert kernels
        take 16-bit activations, and float32 on CPUs.

    Returns:
      The model, and the record of its training.

    Raises:
      CheckpointError: the folder holds no such checkpoint, or a damaged one.
      ValueError: its dense parameters are not those of the model.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    opened = moe.Checkpoint(folder)
    config_json = opened.config()
    config = ModelConfig.from_json(config_json["model"])

    experts = [
        moe.load_experts(opened, EXPERTS.format(layer=layer)) for layer in range(config.layers)
    ]

    def make_experts(layer: int) -> PackedExperts:
        return PackedExperts(experts[layer], recipe=recipe)

    # Only the shapes: no initial parameters are drawn to be thrown away.
    model = nnx.eval_shape(lambda: Decoder(config, make_experts, dtype=dtype, rngs=nnx.Rngs(0)))
    dense = {name: opened.tensor(name).read() for name in opened.names if ".experts." not in name}
    nnx.update(model, unflatten(nnx.state(model, nnx.Param), dense))
    for block, weights in zip(model.blocks, experts, strict=True):
        block.moe.experts.weights.set_value(weights)
    return model, config_json["training"]
