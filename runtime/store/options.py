"""Where the cache is and how much it may hold: from the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tapeout.plugins.errors import UsageError

CACHE_DIR, CACHE_BYTES = "TAPEOUT_CACHE_DIR", "TAPEOUT_CACHE_BYTES"

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?) *(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str, name: str) -> int:
    """Bytes from `50GB`, `50GiB` or `50000000000`; `name` is whose value it is.

    Raises UsageError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name} is {text!r}, expected bytes such as 50000000000, 50GB or 50GiB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[(unit or "").upper()])


def cache_root() -> Path:
    """Where sets from stores are kept: below TAPEOUT_CACHE_DIR, else the user's cache directory."""
    if given := os.environ.get(CACHE_DIR):
        return Path(given).expanduser() / "store"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapeout" / "store"


def cache_limit() -> int | None:
    """Most bytes of the cache; None, where TAPEOUT_CACHE_BYTES is not set, leaves it to the disk."""
    given = os.environ.get(CACHE_BYTES)
    return parse_bytes(given, CACHE_BYTES) if given else None
