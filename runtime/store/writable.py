"""Whether a directory takes new files, asked before anything is fetched into it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tapeout.plugins.errors import UsageError


def check_takes_files(directory: Path, what: str, hint: str) -> None:
    """Raise UsageError unless a file can be made in `directory`; `what` is how the message calls it.

    Permissions alone do not tell: a file system may be mounted to be read only, and root may do everything.
    """
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"{what} cannot be written: {error.strerror or error}", hint=hint) from None
