"""Checks of paths that a command will write to, made before the work and not after it."""

from __future__ import annotations

import os
from pathlib import Path

from tapeout.plugins.errors import UsageError


def check_output(path: Path, option: str) -> None:
    """Refuse an output path that cannot be written; `option` is how the user named it.

    Raises:
        UsageError: it is a directory, its directory is missing or not writable.
    """
    directory = path.absolute().parent
    if path.is_dir():
        raise UsageError(
            f"{option}: {str(path)!r} is a directory, expected a file",
            hint=f"name a file in it: {path / 'NAME'}",
        )
    if not directory.is_dir():
        raise UsageError(
            f"{option}: {str(path)!r} cannot be written, the directory {str(directory)!r} does not exist",
            hint=f"mkdir -p {directory}",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"{option}: {str(path)!r} cannot be written, no permission in {str(directory)!r}",
            hint="choose a directory you may write to",
        )
