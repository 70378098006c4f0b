"""A checkpoint's files: which tensor lies in which shard, and what ``config.json`` says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jax_b12x.moe.checkpoint.safetensors_file import (
    DTYPES,
    CheckpointError,
    Tensor,
    read_header,
)

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """An open checkpoint: names are known, tensors are read when they are asked for.

    A shard's header is read when a tensor of it is first looked up. Keep one open to load many
    layers.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens a ``.safetensors`` file, or a directory of them with or without an index.

        Args:
          path: the file or directory.

        Raises:
          CheckpointError: there is no checkpoint, or its files contradict each other.
        """
        self.path = Path(path)
        self._headers: dict[Path, dict[str, Tensor]] = {}
        self._shards = self._find_shards()
        self.names: tuple[str, ...] = tuple(self._shards)

    def _find_shards(self) -> dict[str, Path]:
        if self.path.is_file():
            return dict.fromkeys(self._header(self.path), self.path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: there is no such file or directory")
        index = self.path / INDEX
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: has no weight_map")
            for name, file in weight_map.items():
                inside = isinstance(file, str) and ".." not in file.replace("\\", "/").split("/")
                if not inside or os.path.isabs(file):
                    raise CheckpointError(
                        f"{index}: weight_map says that {name} is in {file!r}; a shard must be the "
                        "name of a file in the index's folder"
                    )
            return {name: self.path / file for name, file in weight_map.items()}
        shards: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            for tensor in self._header(file).values():
                if tensor.name in shards:
                    raise tensor.error(f"{shards[tensor.name]} holds a tensor of this name too")
                shards[tensor.name] = file
        if not shards:
            raise CheckpointError(f"{self.path}: holds neither {INDEX} nor *.safetensors files")
        return shards

    def _header(self, file: Path) -> dict[str, Tensor]:
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def tensor(self, name: str) -> Tensor:
        """Looks a tensor up.

        Raises:
          CheckpointError: the checkpoint does not name it; the shard that should hold it does not;
            another shard that was read holds it too; its dtype is unknown.
        """
        if name not in self._shards:
            raise CheckpointError(f"{name} is missing from {self.path}")
        file = self._shards[name]
        if not file.is_file():
            raise CheckpointError(f"{name} is missing: its shard {file} does not exist")
        header = self._header(file)
        if name not in header:
            raise CheckpointError(f"{name} is missing from {file}, where {INDEX} says that it is")
        tensor = header[name]
        for other, names in self._headers.items():
            if other != file and name in names:
                raise tensor.error(f"{other} holds a tensor of this name too")
        if tensor.dtype not in DTYPES:
            raise tensor.error(f"dtype {tensor.dtype} is not known")
        return tensor

    def config(self) -> dict[str, Any]:
        """Returns ``config.json``, with ``hf_quant_config.json`` as its ``quantization_config``.

        What ``config.json`` says of quantization itself comes first; a missing file says nothing.

        Raises:
          CheckpointError: one of the files is no JSON object.
        """
        folder = self.path if self.path.is_dir() else self.path.parent
        config: dict[str, Any] = {}
        if (folder / "config.json").is_file():
            config = _read_json(folder / "config.json")
        extra = folder / "hf_quant_config.json"
        if "quantization_config" not in config and extra.is_file():
            quantization = _read_json(extra).get("quantization")
            if not isinstance(quantization, dict):
                raise CheckpointError(f"{extra}: has no quantization section")
            config["quantization_config"] = {"quant_method": "modelopt", **quantization}
        return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return value
