"""SHA-256 of files, remembered by what the file system says about them.

What is remembered is a hint that spares reading: it is no part of any key, and where it is lost or cannot be
written, files are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from tapeout.compiler.files import temporary_file
from tapeout.plugins.errors import UsageError

_VERSION = 1
_MOST_FILES = 4096
#: A file that was written this lately may be written again without its times changing.
_SETTLED_NS = 2_000_000_000


class FileDigests:
    """Digests by path, for as long as size, times, inode and device stay."""

    def __init__(self, memory: Path | None = None) -> None:
        """`memory`: the file that remembers; the default follows XDG_CACHE_HOME."""
        self._memory = memory or _default_memory()
        self._known: dict[str, list[object]] = _load(self._memory)
        self._changed = False

    def sha256(self, path: Path) -> str:
        """SHA-256 (hex) of the file's bytes. Raises UsageError when it cannot be read."""
        try:
            real = os.path.realpath(path)
            with Path(real).open("rb") as file:
                state = _state(os.fstat(file.fileno()))
                known = self._known.get(real)
                if known is not None and known[:-1] == state:
                    return str(known[-1])
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if state == _state(os.fstat(file.fileno())):  # else it was written meanwhile
                    self._known[real] = [*state, digest]
                    self._changed = True
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{path} cannot be read: {reason}") from None
        return digest

    def save(self) -> None:
        """Remember for later runs, but for files that were written a moment ago."""
        if not self._changed:
            return
        latest = time.time_ns() - _SETTLED_NS
        settled = {p: v for p, v in self._known.items() if max(int(str(v[1])), int(str(v[2]))) < latest}
        kept = dict(list(settled.items())[-_MOST_FILES:])
        with contextlib.suppress(OSError):
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            with temporary_file(self._memory) as (temporary, file):
                file.write(json.dumps({"version": _VERSION, "files": kept}).encode())
                file.flush()
                temporary.replace(self._memory)


def _state(status: os.stat_result) -> list[object]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _load(path: Path) -> dict[str, list[object]]:
    """What is remembered; nothing where that cannot be read, whatever the reason."""
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != _VERSION:
            return {}
        files = {str(p): list(v) for p, v in data["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {p: v for p, v in files.items() if len(v) == 6 and all(type(x) is int for x in v[:5])}


def _default_memory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapeout" / "file_digests.json"
