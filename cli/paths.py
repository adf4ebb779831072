"""Checks of paths that a command will write to, made before the work and not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tapeout.plugins.errors import UsageError


def check_output(path: Path, option: str) -> None:
    """Refuse an output path that cannot be written; `option` is how the user named it.

    Raises:
        UsageError: it is a directory, its directory is missing or takes no new file.
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
    try:
        # Permission bits do not tell: root passes them, and a file system may be read-only.
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise UsageError(
            f"{option}: {str(path)!r} cannot be written: {error.strerror or error}",
            hint=f"choose a directory you may write to, {str(directory)!r} takes no new file",
        ) from error
