"""The local cache of blobs: fetched once however many processes want them, bounded, never pulled away
from under a running engine.

    ROOT/blobs/<sha256>                    a whole, checked blob; used last when it was modified last
    ROOT/blobs/<sha256>.<bytes>.partial    one that is being fetched, or whose fetching was stopped
    ROOT/locks/<sha256>.lock               held by who fetches it
    ROOT/sets/<model>-<index>/             links to blobs under the names of the set, and its index
    ROOT/cache.lock                        held by who removes blobs or makes links

A blob in use is share-locked: by its lease while a set is put together, then by whoever opened the engine
(`runtime/engine/in_use.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import CapacityError, TapeoutError, UsageError
from tapeout.runtime.engine.in_use import lock_unused, mark_in_use
from tapeout.runtime.store.remote import RemoteStore
from tapeout.runtime.store.transfer import Blob, Tell, download, silent
from tapeout.runtime.store.writable import check_takes_files

logger = logging.getLogger("tapeout")

_PARTIAL = ".partial"
_OTHER_PLACE = "name another directory in TAPEOUT_CACHE_DIR"


@dataclass(frozen=True)
class _Stored:
    """A file of the cache: what it takes, or will take once it is whole, and when it was used."""

    path: Path
    size_bytes: int
    used: float

    @property
    def sha256(self) -> str:
        return self.path.name.partition(".")[0]


class Cache:
    """Blobs by their SHA-256 under `root`, at most `limit_bytes` of them (None: as the disk allows)."""

    def __init__(self, root: Path, limit_bytes: int | None = None) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.blobs, self.locks, self.sets = root / "blobs", root / "locks", root / "sets"
        try:
            for folder in (self.blobs, self.locks, self.sets):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the cache {root} cannot be used: {error.strerror or error}",
                hint=_OTHER_PLACE,
            ) from None
        for folder in (root, self.blobs, self.locks, self.sets):
            check_takes_files(folder, f"the cache {folder}", _OTHER_PLACE)

    @contextlib.contextmanager
    def leased(
        self, store: RemoteStore, wanted: Sequence[Blob], tell: Tell = silent
    ) -> Iterator[dict[str, Path]]:
        """Paths of blobs by SHA-256, fetched if need be; nobody removes them while the context lasts.

        Raises:
            CapacityError: they do not fit beside what is in use. EngineCorruptError, TapeoutError: see
                `download`.
        """
        needed = {blob.sha256: blob for blob in wanted}
        self._check_limit(list(needed.values()))
        with contextlib.ExitStack() as leases:
            missing = [blob for blob in needed.values() if not self._lease(blob, leases)]
            for blob in missing:
                while not self._lease(blob, leases):
                    self._fetch(store, blob, tell)
            yield {sha256: self.blobs / sha256 for sha256 in needed}

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Alone in changing links and removing blobs."""
        with _lock(self.root / "cache.lock"):
            yield

    def _lease(self, blob: Blob, leases: contextlib.ExitStack) -> bool:
        """Lock a blob that is there; False when it is not."""
        path = self.blobs / blob.sha256
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        mark_in_use(file.fileno(), wait=True)
        try:
            # It may have been removed between opening and locking.
            there = os.path.samestat(path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            there = False
        if not there:
            file.close()
            return False
        leases.enter_context(file)
        touch(path)
        return True

    def _fetch(self, store: RemoteStore, blob: Blob, tell: Tell) -> None:
        path = self.blobs / blob.sha256
        partial = self.blobs / f"{blob.sha256}.{blob.size_bytes}{_PARTIAL}"
        with _lock(
            self.locks / f"{blob.sha256}.lock", lambda: tell(f"{blob.name} is being fetched elsewhere")
        ):
            if path.exists():  # the other process has it
                return
            self._make_room(blob, partial)
            download(store, blob, partial, tell)
            partial.chmod(0o444)
            partial.replace(path)

    # ---- room -------------------------------------------------------------------------------

    def _check_limit(self, wanted: Sequence[Blob]) -> None:
        total = sum(blob.size_bytes for blob in wanted)
        if self.limit_bytes is not None and total > self.limit_bytes:
            raise CapacityError(
                f"{', '.join(blob.name for blob in wanted)} take {total:,} bytes, the cache {self.root} may "
                f"hold {self.limit_bytes:,}",
                hint="raise --cache-size (TAPEOUT_CACHE_BYTES), or fetch into a directory: -o DIR",
            )

    def _make_room(self, blob: Blob, partial: Path) -> None:
        """Remove what was used longest ago until `blob` fits under the limit and onto the disk."""
        with self.changing():
            stored = [s for s in self._stored() if s.path != partial]
            done = partial.stat().st_size if partial.exists() else 0
            total = sum(s.size_bytes for s in stored) + blob.size_bytes
            over = 0 if self.limit_bytes is None else total - self.limit_bytes
            over = max(over, blob.size_bytes - done - shutil.disk_usage(self.blobs).free)
            for old in sorted(stored, key=lambda s: s.used):
                if over <= 0:
                    break
                if self._remove(old):
                    over -= old.size_bytes
            self._unlink_removed()
        if over > 0:
            raise CapacityError(
                f"{blob.name} takes {blob.size_bytes:,} bytes and the cache {self.root} is {over:,} bytes "
                "short: what else it holds is in use",
                hint="raise --cache-size (TAPEOUT_CACHE_BYTES), free some disk, or stop what runs from it",
            )

    def _stored(self) -> Iterator[_Stored]:
        for path in self.blobs.iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                size = status.st_size
                if path.name.endswith(_PARTIAL):
                    size = int(path.name.split(".")[1])
                yield _Stored(path, size, status.st_mtime)

    def _remove(self, old: _Stored) -> bool:
        """Remove a blob that nobody uses, or what is left of a fetch that was stopped."""
        if old.path.name.endswith(_PARTIAL):
            with contextlib.suppress(_Held), _lock(self.locks / f"{old.sha256}.lock", wait=False):
                old.path.unlink(missing_ok=True)
                return True
            return False
        try:
            with old.path.open("rb") as file:
                if not lock_unused(file.fileno()):
                    return False
                old.path.unlink()
                logger.info("cache: removed %s (%s bytes)", old.sha256, old.size_bytes)
                return True
        except FileNotFoundError:
            return True

    def _unlink_removed(self) -> None:
        from tapeout.runtime.store.cached_set import unlink_removed

        for folder in self.sets.iterdir():
            unlink_removed(folder)


def touch(path: Path) -> None:
    """Say that a blob is used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def touch_cached(link: Path) -> None:
    """The same for the blob that an engine of a cached set links to; other links are left alone."""
    with contextlib.suppress(OSError):
        blob = link.resolve(strict=True)
        if blob.parent.name == "blobs" and (blob.parent.parent / "cache.lock").exists():
            touch(blob)


class _Held(Exception):
    """Another process has the lock."""


@contextlib.contextmanager
def _lock(path: Path, waiting: Any = None, *, wait: bool = True) -> Iterator[None]:
    """A lock between processes, freed when its holder dies; `waiting` is called before a wait."""
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        raise UsageError(
            "the cache of a store needs filelock, which is not installed", hint="pip install 'tapeout[store]'"
        ) from None
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                raise _Held from None
            if waiting is not None:
                waiting()
            lock.acquire()
    except OSError as error:
        raise TapeoutError(f"{path} cannot be locked: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()
