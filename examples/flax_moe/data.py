"""The text: the King James Bible, one verse a line, with a fixed split by whole books."""

from __future__ import annotations

import lzma
import pathlib
import re
from typing import NamedTuple

import numpy as np

TEXT = pathlib.Path(__file__).parent / "data" / "kjv.txt.xz"

# Whole books, of several kinds (narrative, wisdom, prophecy, letter), so that no chapter is seen in
# part.
HELD_OUT_BOOKS = ("Ruth", "Est", "Eccl", "Hos", "Amos", "Jonah", "Gal", "Eph", "Jas")
VALIDATION_BOOKS = ("Lam", "Joel", "Zec", "Phi")

_REFERENCE = re.compile(rb"([1-3]?[A-Za-z]+)\d+:\d+ ")


class Split(NamedTuple):
    """The text as ``uint8`` arrays.

    Attributes:
      train: what the model is trained on.
      validation: what the best checkpoint of a run is chosen by.
      held_out: what the reported bits per byte are measured on; nothing is chosen by it.
    """

    train: np.ndarray
    validation: np.ndarray
    held_out: np.ndarray


def load_text(path: pathlib.Path = TEXT) -> Split:
    """Reads the text and splits it by book.

    Raises:
      ValueError: a line does not begin with a reference such as ``Ge1:1``.
    """
    parts: dict[str, list[bytes]] = {"train": [], "validation": [], "held_out": []}
    for line in lzma.decompress(path.read_bytes()).splitlines(keepends=True):
        reference = _REFERENCE.match(line)
        if reference is None:
            raise ValueError(f"{path} has a line without a reference: {line[:40]!r}")
        book = reference[1].decode()
        if book in HELD_OUT_BOOKS:
            parts["held_out"].append(line)
        elif book in VALIDATION_BOOKS:
            parts["validation"].append(line)
        else:
            parts["train"].append(line)
    return Split(**{name: encode(b"".join(lines)) for name, lines in parts.items()})


def encode(text: bytes) -> np.ndarray:
    """Returns the bytes as ``uint8[n]``.

    Raises:
      ValueError: the text holds a byte that is not ASCII.
    """
    tokens = np.frombuffer(text, np.uint8)
    if tokens.size and tokens.max() > 127:
        bad = int(np.argmax(tokens > 127))
        raise ValueError(f"the text's byte {bad} is {tokens[bad]:#x}; the model knows ASCII only")
    return tokens


def decode(tokens: np.ndarray) -> str:
    """Returns the tokens as text."""
    return bytes(np.asarray(tokens, np.uint8)).decode("ascii")


class Windows(NamedTuple):
    """Overlapping windows that cover a text, each byte after the first predicted exactly once.

    Attributes:
      tokens: ``uint8[num_windows, context + 1]``; inputs are all but the last, targets all but the
        first.
      counted: ``bool[num_windows, context]``; whether a target counts in this window.
    """

    tokens: np.ndarray
    counted: np.ndarray


def windows(text: np.ndarray, context: int, stride: int) -> Windows:
    """Cuts ``text`` into windows that overlap by ``context - stride``.

    Each prediction but the first window's sees at least that many bytes.

    Args:
      text: ``uint8[n]``, at least 2 bytes.
      context: inputs a window.
      stride: how far a window starts after the one before, at most ``context``.

    Raises:
      ValueError: ``stride`` is not between 1 and ``context``, or the text is too short.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}; it must be from 1 to context ({context})")
    if text.size < 2:
        raise ValueError(f"the text has {text.size} bytes; it must have at least 2")
    rows, counted = [], []
    for start in range(0, max(1, text.size - 1 - (context - stride)), stride):
        row = text[start : start + context + 1]
        count = np.zeros(context, bool)
        count[(context - stride if start else 0) : row.size - 1] = True
        rows.append(np.pad(row, (0, context + 1 - row.size)))
        counted.append(count)
    return Windows(np.stack(rows), np.stack(counted))
