"""Reads and writes safetensors files: their header, and byte ranges straight into arrays.

The format (https://huggingface.co/docs/safetensors): the header's length as a little-endian
``uint64``, the header, a JSON object of tensor names to ``dtype``, ``shape`` and ``data_offsets``,
then the data. The safetensors library's NumPy interface knows no 8-bit floats and gives whole
tensors; here a slice of a tensor is read into memory that the caller owns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit


class CheckpointError(ValueError):
    """A checkpoint is damaged, or is not what was asked for; the message names file and tensor."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
      name: its name in the checkpoint.
      dtype: the format's name of its dtype, such as ``"F8_E4M3"``.
      shape: its shape.
      file: the file that holds it.
      start: its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}{list(self.shape)} in {self.file})"

    def error(self, problem: str) -> CheckpointError:
        """Returns an error about this tensor."""
        return CheckpointError(f"{self}: {problem}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def read_into(self, out: NDArray[Any], offset: int = 0) -> None:
        """Fills ``out``, contiguous, with the bytes from element ``offset`` on.

        Raises:
          CheckpointError: the file ends before that, or cannot be read.
        """
        view = out.reshape(-1).view(np.uint8)
        if not np.shares_memory(view, out) and out.size:
            raise ValueError("out is not contiguous")
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self.start + offset * self.itemsize)
                done = 0
                while done < view.size:
                    count = stream.readinto(view.data[done:])
                    if not count:
                        raise self.error("the file ends within it")
                    done += count
        except OSError as error:
            raise self.error(f"cannot be read: {error}") from error

    def read(self) -> NDArray[Any]:
        """Returns the whole tensor.

        Raises:
          CheckpointError: the file ends before its end, or cannot be read.
        """
        out = np.empty(self.shape, DTYPES[self.dtype])
        self.read_into(out)
        return out


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads and checks a file's header; no tensor is read.

    Raises:
      CheckpointError: the file cannot be read, is truncated or is no safetensors file.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: truncated: {size} bytes hold no header length")
            (length,) = struct.unpack("<Q", prefix)
            if length > _MAX_HEADER:
                # Text, taken for a length, is always far beyond the limit.
                start = prefix + stream.read(64)
                if start.startswith(b"version https://git-lfs"):
                    raise CheckpointError(
                        f"{path}: is a Git LFS pointer, not the file itself; fetch it with git lfs "
                        "pull"
                    )
                if start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
                    raise CheckpointError(
                        f"{path}: is an HTML or XML page, not a safetensors file; a download gave "
                        "a page in its place"
                    )
                raise CheckpointError(f"{path}: not a safetensors file: a header of {length} bytes")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(text) < length:
        raise CheckpointError(f"{path}: truncated: {len(text)} of {length} header bytes are there")
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file: the header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, item, 8 + length, size) for name, item in header.items()}


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path}: the header names {twice} twice")
    return dict(pairs)


def _entry(path: Path, name: str, item: Any, data_start: int, file_size: int) -> Tensor:
    try:
        dtype, shape = str(item["dtype"]), tuple(int(n) for n in item["shape"])
        begin, end = (int(offset) for offset in item["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: the header's entry of {name} is malformed: {item}"
        ) from None
    tensor = Tensor(name, dtype, shape, path, data_start + begin)
    if dtype in DTYPES:
        size = math.prod(shape) * tensor.itemsize
        if min(shape, default=0) < 0 or begin < 0 or end - begin != size:
            raise tensor.error(f"has data_offsets [{begin}, {end}]; it needs {size} bytes")
    if data_start + end > file_size:
        raise tensor.error(
            f"truncated: it ends at byte {data_start + end} and the file at byte {file_size}"
        )
    return tensor


def write(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Writes a file, one tensor at a time; it appears under its name when it is complete.

    Args:
      path: where to.
      tensors: arrays by name.
      metadata: the header's ``__metadata__``.

    Raises:
      CheckpointError: the format has no name for a dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    # Widest elements first, so that each tensor is aligned to its elements.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    for name in names:
        array = tensors[name]
        if array.dtype not in _NAMES:
            raise CheckpointError(f"{name} has dtype {array.dtype}; safetensors has no such dtype")
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            stream.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
    partial.replace(path)
