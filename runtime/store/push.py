"""`tapeout push`: an engine set into a store. Blobs first, then the index, the tag last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tapeout.plugins.errors import EngineCorruptError, UsageError
from tapeout.runtime.engine_set.directory import EngineSet, open_engine_set
from tapeout.runtime.engine_set.entries import describe_engine
from tapeout.runtime.engine_set.index import EngineEntry, EngineSetIndex, WeightsEntry
from tapeout.runtime.engine_set.index_check import MODEL_NAME
from tapeout.runtime.store.address import SetAddress
from tapeout.runtime.store.remote import RemoteStore, open_store, tag_bytes
from tapeout.runtime.store.transfer import Blob, Tell, silent, stored_sha256, upload


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    Attributes:
        index_sha256: names the set as it was pushed, whatever becomes of its tag.
        files: files of the set; uploaded, uploaded_bytes: those that the store did not have.
        replaced: names of files that the store had in a damaged form (with `verify`).
        tag_moved: False when the tag pointed at this very set already.
    """

    model: str
    index_sha256: str
    files: int
    uploaded: int
    uploaded_bytes: int
    replaced: tuple[str, ...]
    tag_moved: bool


def push_set(directory: Path, address: SetAddress, *, verify: bool = False, tell: Tell = silent) -> Pushed:
    """Copy the set in `directory` to the store and point the tag at it.

    Whatever stops it, readers of the tag find the set it pointed at before. What the store has already,
    from this set or another of its place, is not sent again.

    Args:
        verify: read every file of the set back from the store, and replace damaged ones.

    Raises:
        UsageError: no set there, or the store can only be read.
        EngineError: the set is damaged. TapeoutError: the store failed.
    """
    store = open_store(address)
    store.check_writable()
    engines = open_engine_set(directory)
    index = engines.index or _index_of(engines)
    blobs = [Blob(name, *facts) for name, facts in index.files().items()]
    _check_files(directory, blobs)
    uploaded, replaced = [], []
    for blob in blobs:
        there = _size(store, blob) == blob.size_bytes
        if there and verify and stored_sha256(store, blob, tell) != blob.sha256:
            replaced.append(blob.name)
            there = False
        if not there:
            upload(store, directory / blob.name, blob, tell)
            uploaded.append(blob)
            if verify and stored_sha256(store, blob, tell) != blob.sha256:
                store.remove(store.blob_path(blob.sha256))
                raise EngineCorruptError(f"{address.shown}: {blob.name} was damaged on the way to the store")
    text = index.text().encode()
    sha256 = hashlib.sha256(text).hexdigest()
    store.put_bytes(text, store.blob_path(sha256))
    tag = tag_bytes(sha256, len(text))
    moved = _current_tag(store) != tag
    if moved:
        store.put_bytes(tag, store.tag_path(address.tag))
    sent = sum(blob.size_bytes for blob in uploaded)
    return Pushed(index.model, sha256, len(blobs), len(uploaded), sent, tuple(replaced), moved)


def _index_of(engines: EngineSet) -> EngineSetIndex:
    """The index of a directory that has none; its model has the directory's name."""
    name = engines.directory.resolve().name
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"{engines.directory} has no index.json, and {name!r} is no name for a model: expected letters, "
            "digits and . _ + -",
            hint="rename the directory",
        )
    entries: list[EngineEntry] = []
    shared: list[WeightsEntry] = []
    for entry in engines.engines:
        described, weights = describe_engine(engines.directory / entry.file)
        entries.append(described)
        shared += weights
    versions = {"tapeout": version("tapeout")}
    return EngineSetIndex.of(name, engines.source, tuple(entries), tuple(shared), versions)


def _check_files(directory: Path, blobs: list[Blob]) -> None:
    """All files are there before the first is sent."""
    problems = list(_missing(directory, blobs))
    if problems:
        raise EngineCorruptError(
            f"{directory} is not the set that its index.json lists:\n"
            + "\n".join(f"  {p}" for p in problems),
            hint="build the set again, or fetch it whole: tapeout pull URL -o DIR --all",
        )


def _missing(directory: Path, blobs: list[Blob]) -> Iterator[str]:
    for blob in blobs:
        path = directory / blob.name
        if not path.is_file():
            yield f"{blob.name} is missing"
        elif (size := path.stat().st_size) != blob.size_bytes:
            yield f"{blob.name} has {size:,} bytes, expected {blob.size_bytes:,}"


def _size(store: RemoteStore, blob: Blob) -> int | None:
    try:
        return store.size_of(blob.sha256)
    except FileNotFoundError:
        return None


def _current_tag(store: RemoteStore) -> bytes | None:
    try:
        return store.read(store.tag_path(store.address.tag))
    except FileNotFoundError:
        return None
