"""The engines of one model in a matrix's output: their index, kept sound while engines are replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from tapeout.compiler.files import write_text
from tapeout.compiler.matrix.content_key import TIMINGS, changed_factors, key_of, timings_factor
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.schema import EngineSpec
from tapeout.plugins.errors import EngineError, UsageError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine_set import (
    INDEX_NAME,
    EngineEntry,
    EngineSetIndex,
    WeightsEntry,
    describe_engine,
    load_index,
    save_index,
)


class EngineSet:
    """`DIR/<model>`: what its index lists, and what is listed anew."""

    def __init__(self, folder: Path, model: str, digests: FileDigests) -> None:
        self.folder, self.model = folder, model
        self._digests = digests
        self._index: EngineSetIndex | None = None
        self.unreadable: str | None = None
        if (folder / INDEX_NAME).exists():
            try:
                self._index = load_index(folder)
            except (EngineError, UsageError) as error:
                self.unreadable = error.message  # it is written again, with what is built again
        self._weights_before = {w.file for w in self._index.weights} if self._index else set()

    def stale(self, spec: EngineSpec, factors: Mapping[str, str]) -> str | None:
        """Why the engine must be built; None when what is there is what would be built."""
        path = self.folder / spec.file
        if not path.exists():
            return "there was no engine yet"
        entry = self.entry(spec.file)
        if entry is None:
            return "the index cannot be read" if self.unreadable else "it was not in the index"
        if damaged := self._damaged(entry):
            return damaged
        try:
            with open_engine(path, verify=False) as engine:
                timings = timings_factor(spec.options, engine.program, engine.manifest.limits)
        except EngineError as error:
            return error.message
        new = {**factors, TIMINGS: timings}
        if key_of(new) != entry.content_key:
            return self._difference(path, entry.content_key, new)
        if spec.options.require_timed and not entry.timed:
            return "not timed, which require-timed asks for"
        return None

    def entry(self, file: str) -> EngineEntry | None:
        """What the index says about an engine."""
        engines = self._index.engines if self._index else ()
        return next((e for e in engines if e.file == file), None)

    def made_with(self, spec: EngineSpec, factors: Mapping[str, str]) -> bool:
        """Is there an engine of these factors, whatever its timings?"""
        path = self.folder / spec.file
        if not path.is_file():
            return False
        old = _noted_factors(path)
        return {name: value for name, value in old.items() if name != TIMINGS} == dict(factors)

    def key(self, spec: EngineSpec, factors: Mapping[str, str]) -> dict[str, str]:
        """All factors of the engine that is there. Raises EngineError."""
        with open_engine(self.folder / spec.file, verify=False) as engine:
            timings = timings_factor(spec.options, engine.program, engine.manifest.limits)
        return {**factors, TIMINGS: timings}

    def add(self, spec: EngineSpec, factors: Mapping[str, str]) -> EngineEntry:
        """List an engine that was just built, and write the index.

        Raises TapeoutError when the engine or the index is unsound or cannot be written.
        """
        path = self.folder / spec.file
        all_factors = self.key(spec, factors)
        key = key_of(all_factors)
        entry, weights = describe_engine(path, content_key=key, hashes=_Hashes(self._digests))
        with open_engine(path, verify=False) as engine:
            source = engine.manifest.model.checkpoint
        engines: dict[str, EngineEntry] = {}
        shared: dict[str, WeightsEntry] = {w.file: w for w in weights}
        # Engines of another checkpoint are another model: the index can list one.
        if self._index is not None and self._index.source == source:
            engines = {e.file: e for e in self._index.engines if (self.folder / e.file).exists()}
            shared = {w.file: w for w in self._index.weights} | shared
        engines[entry.file] = entry
        used = {name for e in engines.values() for name in e.weights}
        self._index = EngineSetIndex.of(
            self.model,
            source,
            tuple(engines.values()),
            tuple(w for name, w in shared.items() if name in used),
            {"tapeout": version("tapeout")},
        )
        save_index(self._index, self.folder)
        write_text(_factors_path(path), json.dumps({"key": key, "factors": all_factors}, indent=1) + "\n")
        return entry

    def remove_old_weights(self) -> None:
        """Remove weight files that the index listed before and no engine needs any more."""
        now = {w.file for w in self._index.weights} if self._index else self._weights_before
        for name in self._weights_before - now:
            with suppress(OSError):
                (self.folder / name).unlink()

    def _damaged(self, entry: EngineEntry) -> str | None:
        """What of the engine's files is not as the index says."""
        assert self._index is not None
        for name, (size, sha256) in self._index.files().items():
            if name != entry.file and name not in entry.weights:
                continue
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or self._digests.sha256(path) != sha256:
                return f"{name} is not the file that the index lists"
        return None

    def _difference(self, path: Path, key: str, new: Mapping[str, str]) -> str:
        """Which factors changed, as far as what the last build noted tells."""
        old = _noted_factors(path)
        if key_of(old) != key:
            return "its content key changed"
        return f"changed: {', '.join(changed_factors(old, new))}"


def _noted_factors(engine: Path) -> dict[str, str]:
    """The factors that the engine's last build noted; empty when that cannot be read."""
    try:
        noted = json.loads(_factors_path(engine).read_bytes())
        return {str(name): str(value) for name, value in noted["factors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _factors_path(engine: Path) -> Path:
    return engine.with_name(engine.name + ".key.json")


class _Hashes(Mapping[Path, str]):
    """Digests of files, as they are asked for."""

    def __init__(self, digests: FileDigests) -> None:
        self._digests = digests

    def __getitem__(self, path: Path) -> str:
        return self._digests.sha256(path)

    def __iter__(self) -> Iterator[Path]:
        return iter(())

    def __len__(self) -> int:
        return 0
