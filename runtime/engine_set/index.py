"""The index of an engine set: `DIR/<model>/index.json`, which lists the engines of one model.

    DIR/<model>/index.json                 written last: whoever sees it sees a whole set
    DIR/<model>/<sku>.engine               an engine for each target, and for each precision
    DIR/<model>/<digest>.weights.safetensors   the weights that engines of one precision share

An index says nothing about host, path or time: the same engines give the same bytes.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine.codec import decode, encode, faults
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine_set.index_check import index_problems

INDEX_NAME = "index.json"
INDEX_FORMAT = "tapeout-engine-set"
INDEX_VERSION = 1

_HINT = "write it again with `tapeout build --matrix`, or fetch the set again with `tapeout pull`"


@dataclass(frozen=True)
class WeightsEntry:
    """A weight file that stands beside the engines that share it.

    Attributes:
        file: its name in the set's directory.
        size_bytes: of the file. sha256: of the whole file, 64 lower-case hex digits.
    """

    file: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class EngineEntry:
    """An engine of the set: what there is to know before it is opened or fetched.

    Attributes:
        file: its name in the set's directory, `<something>.engine`.
        target: the manifest's: `cpu:<level>`, `cuda:<sku>` or `cuda:sm_NN`.
        sku: the GPU model it was built for; None on `cpu` and for a generic `cuda:sm_NN`.
        sm: compute capability times ten; None on `cpu`.
        dtype, quantize, limits, timed, versions: the manifest's.
        size_bytes: of the engine file, without shared weights. sha256: of the whole file, 64 hex digits.
        content_key: names all that decided the engine's content; opaque here, equal means equal.
        weights: names of the shared weight files it needs, each listed in the index; empty when it
            embeds its weights.
    """

    file: str
    target: str
    sku: str | None
    sm: int | None
    dtype: str
    quantize: str
    limits: Limits
    timed: bool
    size_bytes: int
    sha256: str
    content_key: str
    weights: tuple[str, ...]
    versions: Mapping[str, str]

    @property
    def precision(self) -> str:
        """What a user chooses by: the quantization where there is one, else the dtype."""
        return self.dtype if self.quantize == "none" else self.quantize


@dataclass(frozen=True)
class EngineSetIndex:
    """All engines of one model, in the order of their file names.

    Attributes:
        format, format_version: `INDEX_FORMAT` and `INDEX_VERSION`; nothing else can be made or loaded.
        model: the set's name, which is also its directory's where a matrix wrote it.
        source: what the model came from: the manifests' `model.checkpoint` (format and digests, no path).
        engines: the entries, sorted by file name.
        weights: the shared weight files, sorted by file name; every one belongs to an engine.
        versions: of what wrote the index, at least `tapeout`.
    """

    format: str
    format_version: int
    model: str
    source: str
    engines: tuple[EngineEntry, ...]
    weights: tuple[WeightsEntry, ...]
    versions: Mapping[str, str]

    @classmethod
    def of(
        cls,
        model: str,
        source: str,
        engines: tuple[EngineEntry, ...],
        weights: tuple[WeightsEntry, ...],
        versions: Mapping[str, str],
    ) -> EngineSetIndex:
        """An index of this version; entries are sorted, weights listed several times are listed once."""
        by_file = {(w.file, w.size_bytes, w.sha256): w for w in weights}
        return cls(
            INDEX_FORMAT,
            INDEX_VERSION,
            model,
            source,
            tuple(sorted(engines, key=lambda e: e.file)),
            tuple(by_file[key] for key in sorted(by_file)),
            dict(versions),
        )

    def files(self) -> dict[str, tuple[int, str]]:
        """Every file of the set but the index: name to size in bytes and SHA-256."""
        entries: tuple[WeightsEntry | EngineEntry, ...] = (*self.weights, *self.engines)
        return {entry.file: (entry.size_bytes, entry.sha256) for entry in entries}

    def text(self) -> str:
        """The JSON text that `parse_index` takes.

        Raises:
            TapeoutError: the index is unsound; every problem is listed.
        """
        problems = index_problems(self, INDEX_FORMAT, INDEX_VERSION)
        if problems:
            raise TapeoutError(
                "the index of an engine set is unsound and is not written:\n"
                + "\n".join(f"  {problem}" for problem in problems)
            )
        return json.dumps(encode(self), indent=1) + "\n"


def parse_index(text: str | bytes, where: str) -> EngineSetIndex:
    """The index that a text holds; `where` names it in errors.

    Raises:
        EngineIncompatibleError: another version of the format.
        EngineCorruptError: no index, or an unsound one; every problem is listed.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineCorruptError(f"{where} is not JSON: {error}", hint=_HINT) from None
    if not isinstance(data, Mapping) or data.get("format") != INDEX_FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise EngineCorruptError(
            f"{where} is not the index of an engine set: its format is {found!r}, expected {INDEX_FORMAT!r}",
            hint=_HINT,
        )
    # Before anything else: what another version calls wrong may be right in it.
    version = data.get("format_version")
    if type(version) is not int or version != INDEX_VERSION:
        raise EngineIncompatibleError(
            f"{where} has version {version!r} of the index format, this tapeout reads {INDEX_VERSION}",
            hint="use the tapeout that wrote it, or write the set again with this one",
        )
    problems = _field_problems(data)
    if not problems:
        index = decode(EngineSetIndex, data, "index")
        problems = index_problems(index, INDEX_FORMAT, INDEX_VERSION)
    if problems:
        raise EngineCorruptError(
            f"{where} is unsound:\n" + "\n".join(f"  {problem}" for problem in problems), hint=_HINT
        )
    return index


def load_index(directory: Path) -> EngineSetIndex:
    """The index of the set in `directory`.

    Raises:
        UsageError: there is none, or it cannot be read.
        EngineCorruptError, EngineIncompatibleError: see `parse_index`.
    """
    path = directory / INDEX_NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}",
            hint="`tapeout build --matrix` and `tapeout pull` write engine sets",
        ) from None
    return parse_index(text, str(path))


def save_index(index: EngineSetIndex, directory: Path) -> Path:
    """Write `directory/index.json`: a reader finds the old one or this one, whole.

    Raises:
        TapeoutError: the index is unsound (every problem is listed) or the file cannot be written.
    """
    text, path = index.text(), directory / INDEX_NAME
    temporary = directory / f".{INDEX_NAME}.{secrets.token_hex(8)}.tmp"
    try:
        try:
            with temporary.open("xb") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TapeoutError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _field_problems(data: Mapping[str, Any]) -> list[str]:
    """Keys and types, entry by entry, so that one bad entry does not hide another."""
    problems = []
    shallow = dict(data)
    for key, kind in (("engines", EngineEntry), ("weights", WeightsEntry)):
        if isinstance(data.get(key), list):
            shallow[key] = []
            for i, entry in enumerate(data[key]):
                problems += faults(kind, entry, f"{key}[{i}]")
    return faults(EngineSetIndex, shallow, "index") + problems
