"""Where tables are printed: whole lines, whatever the output is."""

from __future__ import annotations

from typing import IO

from rich.console import Console

_GUESS, _WIDTH = 80, 160  # of a file or a pipe: what rich takes it for, and what our tables need


def console(file: IO[str] | None = None) -> Console:
    """Returns a console on ``file``, or on the standard output.

    It is as wide as the terminal, if it is one, or as ``COLUMNS`` says.
    """
    result = Console(file=file)
    guessed = not result.is_terminal and result.width == _GUESS
    return Console(file=file, width=_WIDTH) if guessed else result
