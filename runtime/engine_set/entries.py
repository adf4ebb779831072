"""Index entries of engine files that are there: read from their headers, hashed as files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tapeout.plugins.errors import EngineCorruptError, UsageError
from tapeout.runtime.engine.reader import Engine, open_engine
from tapeout.runtime.engine_set.index import EngineEntry, WeightsEntry


def describe_engine(
    path: Path, *, content_key: str | None = None, hashes: Mapping[Path, str] | None = None
) -> tuple[EngineEntry, tuple[WeightsEntry, ...]]:
    """The entry of an engine file, and of the weight files it shares.

    Args:
        content_key: None takes the engine's digest, which is as good a name of its content.
        hashes: SHA-256 of files that the caller hashed already, by path; others are read whole.

    Raises:
        UsageError: there is no such file. EngineError: it is no engine, is damaged, of another version,
            or lacks its weight file. Only headers are checked; `sha256` is the files' as they are.
    """
    known = hashes or {}
    with open_engine(path, verify=False) as engine:
        weights = tuple(
            WeightsEntry(file.name, file.stat().st_size, known.get(file) or file_sha256(file))
            for file in engine.files[1:]
        )
        sha256 = known.get(path) or file_sha256(path)
        return entry_of(engine, sha256, content_key or engine.digest, tuple(w.file for w in weights)), weights


def entry_of(engine: Engine, sha256: str, content_key: str, weights: tuple[str, ...]) -> EngineEntry:
    """The entry of an open engine."""
    manifest = engine.manifest
    kind, _, name = manifest.target.partition(":")
    if kind == "cuda" and engine.launches is None:
        raise EngineCorruptError(f"{engine.path} was built for {manifest.target} but holds no launches")
    generic = kind != "cuda" or name.startswith("sm_")
    return EngineEntry(
        file=engine.path.name,
        target=manifest.target,
        sku=None if generic else name,
        sm=None if engine.launches is None else engine.launches.sm,
        dtype=manifest.model.dtype,
        quantize=manifest.model.quantize,
        limits=manifest.limits,
        timed=manifest.timed,
        size_bytes=engine.path.stat().st_size,
        sha256=sha256,
        content_key=content_key,
        weights=weights,
        versions=dict(manifest.versions),
    )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex; read through one buffer. Raises UsageError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
