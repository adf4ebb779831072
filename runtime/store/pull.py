"""`tapeout pull`: engines of a set out of a store, into the cache or a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine_set.choose import asked_for, choose_engine, has_gpu_engines
from tapeout.runtime.engine_set.entries import file_sha256
from tapeout.runtime.engine_set.index import (
    INDEX_NAME,
    EngineEntry,
    EngineSetIndex,
    load_index,
    save_index,
)
from tapeout.runtime.engine_set.machine import this_machine
from tapeout.runtime.store.address import SetAddress
from tapeout.runtime.store.cache import Cache
from tapeout.runtime.store.cached_set import link_set, reduced
from tapeout.runtime.store.remote import RemoteStore, StoredSet, open_store
from tapeout.runtime.store.transfer import Blob, Tell, download, silent
from tapeout.runtime.store.writable import check_takes_files


@dataclass(frozen=True)
class Wanted:
    """Which engines of a set to fetch: this machine's, those of a target or a precision, or all.

    `one` is for who runs what is fetched: exactly one, by the rules that hold for a directory.
    """

    target: str | None = None
    precision: str | None = None
    all: bool = False
    one: bool = False

    def of(self, index: EngineSetIndex, where: str) -> list[EngineEntry]:
        """The entries meant.

        A whole target (`cuda:h200`) may be of several engines, which are all meant: a machine that fetches
        for another one cannot choose among them.

        Raises:
            UsageError, EngineError: see `choose_engine`.
        """
        whole = self.target is not None and ":" in self.target
        if self.all or (whole and not self.one):
            return asked_for(index.engines, where, self.target, self.precision)
        machine = None
        if not whole:
            machine = this_machine(look_for_gpu=self.target != "cpu" and has_gpu_engines(index.engines))
        return [choose_engine(index.engines, machine, where, target=self.target, precision=self.precision)]


@dataclass(frozen=True)
class Pulled:
    """What a pull left: a directory that is an engine set, and the engines of it that were meant."""

    directory: Path
    engines: tuple[EngineEntry, ...]
    index_sha256: str

    @property
    def paths(self) -> list[Path]:
        return [self.directory / entry.file for entry in self.engines]


@contextlib.contextmanager
def pulled_into_cache(
    address: SetAddress, cache: Cache, wanted: Wanted, tell: Tell = silent
) -> Iterator[Pulled]:
    """Fetch what the cache lacks; it stays there at least as long as the context lasts.

    Raises:
        UsageError: no such set or tag, nothing in it that is wanted. EngineError: it is damaged.
        CapacityError: it does not fit. TapeoutError: the store failed.
    """
    store = open_store(address)
    stored = store.read_set()
    entries = wanted.of(stored.index, address.text())
    with cache.leased(store, _blobs(stored, entries), tell):
        directory = cache.sets / f"{stored.index.model}-{stored.sha256[:16]}"
        with cache.changing():
            link_set(directory, cache.blobs, stored.index, entries)
        yield Pulled(directory, tuple(entries), stored.sha256)


def pull_into_directory(address: SetAddress, directory: Path, wanted: Wanted, tell: Tell = silent) -> Pulled:
    """Fetch engines into a directory that becomes, or stays, an engine set.

    Files that are there and right are kept; engines of an earlier pull stay in the index if the set in the
    store still has them as they are, else they are removed. The index is written when all files are there.

    Raises: as `pulled_into_cache`; UsageError when the directory cannot be written.
    """
    store = open_store(address)
    stored = store.read_set()
    entries = wanted.of(stored.index, address.text())
    with _alone_in(directory):
        old = _old_files(directory, stored)
        kept = [
            e.file for e in stored.index.engines if all(name in old.same for name in (e.file, *e.weights))
        ]
        index = reduced(stored.index, {*kept, *(entry.file for entry in entries)})
        for blob in _blobs(stored, entries):
            _fetch_file(store, blob, directory, tell)
        save_index(index, directory)
        for name in old.listed - index.files().keys():
            (directory / name).unlink(missing_ok=True)
        for leftover in directory.glob(".*.partial"):  # of files that are whole now, or no longer wanted
            leftover.unlink(missing_ok=True)
    return Pulled(directory, tuple(entries), stored.sha256)


@dataclass(frozen=True)
class _OldFiles:
    """Files that a directory's index lists, and those of them that the set in the store has as well."""

    listed: frozenset[str]
    same: frozenset[str]


def _old_files(directory: Path, stored: StoredSet) -> _OldFiles:
    if not (directory / INDEX_NAME).exists():
        return _OldFiles(frozenset(), frozenset())
    old = load_index(directory)
    if old.model != stored.index.model:
        raise UsageError(
            f"{directory} holds a set of model {old.model!r}, the one to fetch is of {stored.index.model!r}",
            hint="fetch it into another directory",
        )
    listed, new = old.files(), stored.index.files()
    same = (n for n, facts in listed.items() if new.get(n) == facts and (directory / n).is_file())
    return _OldFiles(frozenset(listed), frozenset(same))


def _fetch_file(store: RemoteStore, blob: Blob, directory: Path, tell: Tell) -> None:
    path = directory / blob.name
    if path.is_file() and path.stat().st_size == blob.size_bytes:
        tell(f"{blob.name} is there, checking it")
        if file_sha256(path) == blob.sha256:
            return
    partial = directory / f".{blob.name[:100]}.{blob.sha256[:16]}.partial"
    download(store, blob, partial, tell)
    partial.replace(path)


def _blobs(stored: StoredSet, entries: Sequence[EngineEntry]) -> list[Blob]:
    """Weights first: they take longest, and an engine is nothing without them."""
    index = reduced(stored.index, {entry.file for entry in entries})
    return [Blob(name, *facts) for name, facts in index.files().items()]


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """The directory, made if need be, for this process alone; others that fetch into it wait."""
    hint = "give a directory you may write to"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"--output: {str(directory)!r} cannot be used: {error.strerror or error}", hint=hint
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise TapeoutError(f"{directory} cannot be locked: {error.strerror or error}") from error
        check_takes_files(directory, f"--output: {str(directory)!r}", hint)
        yield
    finally:
        os.close(fd)
