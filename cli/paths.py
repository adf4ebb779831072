"""Checks of paths that a command will write to, made before the work and not after it."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tapeout.plugins.errors import UsageError

_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")
_MOST_LINKS = 40  # as Linux allows
#: What a temporary file's name keeps of the target's: names end at 255 bytes.
_KEPT_NAME = 32


def check_output(path: Path, option: str, *, inputs: Iterable[Path] = (), stream: bool = False) -> None:
    """Refuse an output path that cannot be written; `option` is how the user named it.

    Args:
        inputs: files that the command reads; it must not overwrite one.
        stream: devices, FIFOs and `/proc/self/fd/N` are fine too, for results that are text.

    Raises:
        UsageError: it is a directory, an input, no regular file, or its directory is missing or
            takes no new file.
    """
    named = f"{option}: {str(path)!r}"
    try:
        target = final_target(path)
        status = target.stat() if target.exists() else None
        directory = target.parent
        has_directory = directory.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{named} cannot be written: {reason}", hint="give a file's path") from error
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise UsageError(
            f"{named} is a directory, expected a file", hint=f"name a file in it: {path / 'NAME'}"
        )
    if status is not None and (is_special(status) or _is_descriptor(target)):
        _check_special(target, status, named, stream)
        return
    if not has_directory:
        raise UsageError(
            f"{named} cannot be written, the directory {str(directory)!r} does not exist",
            hint=f"mkdir -p {directory}",
        )
    if status is not None:
        check_no_input(status, inputs, named)
    try:
        # Permission bits do not tell: root passes them, and a file system may be read-only.
        with tempfile.TemporaryFile(dir=directory):  # without a name: nothing is left when a signal comes
            pass
    except OSError as error:
        raise UsageError(
            f"{named} cannot be written: {error.strerror or error}",
            hint=f"choose a directory you may write to, {str(directory)!r} takes no new file",
        ) from error


def check_no_input(output: os.stat_result, inputs: Iterable[Path], named: str) -> None:
    """Refuse to write to a file that is read, whatever links lead to it."""
    for source in inputs:
        try:
            same = os.path.samestat(source.stat(), output)
        except (OSError, ValueError):
            continue  # whoever reads it will tell
        if same:
            raise UsageError(
                f"{named} is an input of this command, {str(source)!r}, and would be overwritten",
                hint="give the output another name",
            )


def final_target(path: Path) -> Path:
    """The file that links lead to; it may not exist. A descriptor under /proc is kept as it is."""
    path = path.absolute()
    for _ in range(_MOST_LINKS):
        path = path.parent.resolve() / path.name
        if _is_descriptor(path) or not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise RuntimeError("too many levels of symbolic links")


def own_descriptor(target: Path) -> int | None:
    """The number in `/proc/self/fd/N`: there the open file itself is meant, with its position."""
    own = _is_descriptor(target) and target.parts[2] == str(os.getpid())
    return int(target.name) if own else None


def is_special(status: os.stat_result) -> bool:
    """A device, FIFO or socket: written to as it is, never replaced by a file of its name."""
    return not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)


def temporary_beside(target: Path) -> Path:
    """A fresh name in the target's directory. Known before the file exists, so that whoever makes it
    can remove it, whenever a signal comes."""
    return target.with_name(f".{target.name[:_KEPT_NAME]}.{secrets.token_hex(8)}")


def _is_descriptor(path: Path) -> bool:
    return path.name.isdecimal() and _DESCRIPTORS.fullmatch(str(path.parent)) is not None


def _check_special(target: Path, status: os.stat_result, named: str, stream: bool) -> None:
    if not stream or stat.S_ISSOCK(status.st_mode) or stat.S_ISBLK(status.st_mode):
        raise UsageError(f"{named} is not a regular file, expected a file", hint="give a file's path")
    if not os.access(target, os.W_OK):
        raise UsageError(f"{named} cannot be written: permission denied")
