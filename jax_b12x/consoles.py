"""Where tables are printed: whole lines, whatever the output is."""

from __future__ import annotations

import shutil
from typing import IO

from rich.console import Console

_WIDTH = 160  # of a file or a pipe, which rich would take for a terminal of 80 columns


def console(file: IO[str] | None = None) -> Console:
    """Returns a console on ``file``, or on the standard output.

    The latter is as wide as the terminal, if it is one, or as ``COLUMNS`` says.
    """
    if file is not None:
        return Console(file=file, width=_WIDTH)
    return Console(width=shutil.get_terminal_size((_WIDTH, 24)).columns)
