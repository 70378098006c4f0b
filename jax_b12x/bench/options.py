"""Option types that benchmarks share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence


def positive(text: str) -> int:
    """Parses an integer from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 1")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Parses integers from 1, separated by commas: ``1,8,64``."""
    return tuple(positive(part) for part in _parts(text))


def seconds(text: str) -> float:
    """Parses a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parses pairs, separated by commas: ``2048x768,4096x1408`` (hidden x intermediate)."""
    return tuple(_shape(part) for part in _parts(text))


def one_or_more_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser of names from ``choices``, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        for part in _parts(text):
            if part not in choices:
                raise argparse.ArgumentTypeError(f"{part!r} must be one of {', '.join(choices)}")
        return tuple(dict.fromkeys(_parts(text)))

    return parse


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
    return parts


def _shape(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be hidden x intermediate, for example 2048x768"
        )
    hidden, intermediate = map(int, text.split("x"))
    return hidden, intermediate
