"""Every environment variable that jax_b12x reads: name, type, default, check and meaning.

This is the only module that looks at the environment. A value is read when it is asked for, so that
a test may set a variable, and a bad value raises :class:`ConfigError`, which names the variable,
what it was and what is allowed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """An environment variable holds a value that it may not hold."""


@dataclasses.dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable.

    Attributes:
      name: its name in the environment.
      default: the value when it is unset or empty.
      parse: turns the text into a value; raises ``ValueError`` for text that is not allowed.
      allowed: the allowed forms, in words, for the error message and the documentation.
      meaning: what it does, in one or two sentences.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    allowed: str
    meaning: str

    def get(self) -> T:
        """Returns the value in force.

        Raises:
          ConfigError: the text in the environment is not one of the allowed forms.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(
                f"{self.name}={text!r} is not understood; allowed: {self.allowed}"
            ) from None


def _parse_tristate(text: str) -> bool | None:
    return _choice({"0": False, "1": True}, text)


def _choice(choices: dict[str, T], text: str) -> T:
    try:
        return choices[text]
    except KeyError:
        raise ValueError(text) from None


NVFP4_SPLIT_DECODE: EnvVar[bool | None] = EnvVar(
    name="B12X_NVFP4_SPLIT_DECODE",
    default=None,
    parse=_parse_tristate,
    allowed="0 (fused), 1 (split), or unset (the plan decides)",
    meaning=(
        "Forces how `nvfp4` decode is launched: 0 fused (diagnostic), 1 split. It does not touch "
        "other recipes, the dynamic path, or a plan whose caller names an implementation."
    ),
)

HOST_ISA: EnvVar[str] = EnvVar(
    name="B12X_HOST_ISA",
    default="auto",
    parse=lambda text: _choice({isa: isa for isa in ("auto", "baseline", "avx2", "avx512")}, text),
    allowed="auto, baseline, avx2 or avx512",
    meaning=(
        "The instruction set of the CPU kernels. `auto` takes the widest that this processor has; "
        "a set that it lacks is refused."
    ),
)

_SIZE_UNITS = {"": 1, "B": 1, "KB": 1024, "MB": 1024**2}


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as ``512KB``, ``1MB`` or ``65536``.

    Args:
      text: digits, with or without one of the units B, KB (1024 bytes) and MB (1024 KB).

    Raises:
      ValueError: it has another form.
    """
    digits = text.rstrip("BKMbkm")
    unit = text[len(digits) :].upper()
    if not digits.isascii() or not digits.isdigit() or unit not in _SIZE_UNITS:
        raise ValueError(text)
    return int(digits) * _SIZE_UNITS[unit]


def _parse_positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(text)
    return int(text)


def _parse_timeout_ms(text: str) -> int:
    milliseconds = _parse_positive(text)
    if milliseconds > 3_600_000:
        raise ValueError(text)
    return milliseconds


ONESHOT_MAX_SIZE: EnvVar[int | None] = EnvVar(
    name="B12X_ONESHOT_MAX_SIZE",
    default=None,
    parse=lambda text: None if text == "auto" else parse_size(text),
    allowed="auto, or a size such as 512KB, 1MB or 65536 (bytes)",
    meaning=(
        "The largest message, in bytes a rank, that a one-shot collective takes; larger ones go to "
        "XLA's. `auto` is the size at which the benchmark saw XLA's win. A pool whose maker names "
        "a cutoff does not look at it."
    ),
)

ONESHOT_SINGLE_CHANNEL: EnvVar[bool] = EnvVar(
    name="B12X_ONESHOT_SINGLE_CHANNEL",
    default=False,
    parse=lambda text: _choice({"0": False, "1": True}, text),
    allowed="0 (every call site has a channel of its own) or 1 (one channel a lane)",
    meaning=(
        "What a pool does whose maker names no isolation: 0 is isolation='call_site', 1 is "
        "isolation='lane', which saves memory and asks for ordered programs."
    ),
)

ONESHOT_TIMEOUT_MS: EnvVar[int] = EnvVar(
    name="B12X_ONESHOT_TIMEOUT_MS",
    default=30_000,
    parse=_parse_timeout_ms,
    allowed="a whole number of milliseconds from 1 to 3600000 (an hour)",
    meaning=(
        "How long a rank waits for another one in a one-shot collective before the call fails. A "
        "pool whose maker names a timeout does not look at it."
    ),
)

ALL: tuple[EnvVar[object], ...] = (  # type: ignore[assignment]
    NVFP4_SPLIT_DECODE,
    HOST_ISA,
    ONESHOT_MAX_SIZE,
    ONESHOT_SINGLE_CHANNEL,
    ONESHOT_TIMEOUT_MS,
)


def set_variables() -> dict[str, str]:
    """Returns the text of each of these variables that the environment sets, by name."""
    return {variable.name: text for variable in ALL if (text := os.environ.get(variable.name))}


def cpu_client_threads() -> int:
    """Returns how many threads XLA's CPU client has: XLA's own ``NPROC``, else the processors."""
    text = os.environ.get("NPROC", "").strip()
    if text.isdecimal() and int(text) > 0:
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
