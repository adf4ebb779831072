"""Blobs between a store and files here: hashed on the way, resumed where a download stopped."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import EngineCorruptError, TapeoutError
from tapeout.runtime.store.remote import RemoteStore

#: One request of a download, and how many are under way; what is held in memory is their product.
PIECE_BYTES, PIECES = 8 << 20, 6

#: Told what is being transferred, for people.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Blob:
    """A file of a set: its name there, and the name of its content."""

    name: str
    size_bytes: int
    sha256: str


def _damaged(store: RemoteStore, blob: Blob, found: str) -> EngineCorruptError:
    return EngineCorruptError(
        f"{store.address.text()}: {blob.name} is damaged: {store.blob_path(blob.sha256)} has {found}, "
        f"expected {blob.size_bytes:,} bytes with SHA-256 {blob.sha256}",
        hint="`tapeout push DIR URL --verify` finds and replaces damaged files of a store",
    )


def silent(text: str) -> None:
    """A `Tell` that tells nobody."""


def download(store: RemoteStore, blob: Blob, partial: Path, tell: Tell = silent) -> None:
    """Fetch a blob into `partial`, from where an earlier attempt stopped, and bring it to the disk.

    The caller gives the file its name, and has a lock on it.

    Raises:
        EngineCorruptError: what came is not what its name says; the file is removed.
        TapeoutError: the store failed, or the disk; what came so far stays for the next attempt.
    """
    path = store.blob_path(blob.sha256)
    try:
        size = store.size_of(blob.sha256)
        if size not in (None, blob.size_bytes):
            raise _damaged(store, blob, f"{size:,} bytes")
        ranges = store.has_ranges(path, blob.size_bytes)
        sha = hashlib.sha256()
        with partial.open("a+b") as file:
            done = _resume(file, sha, blob, keep=ranges)
            pieces = _pieces(store, path, done, blob.size_bytes) if ranges else _stream(store, path)
            for data in pieces:
                file.write(data)
                sha.update(data)
                done += len(data)
                tell(f"{blob.name} {done / blob.size_bytes:.0%} of {blob.size_bytes:,} bytes")
                if done > blob.size_bytes:
                    break
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        raise EngineCorruptError(
            f"{store.address.text()}: {blob.name} is not there: {path}",
            hint="the set is incomplete in its store: push it again",
        ) from None
    except OSError as error:
        raise TapeoutError(
            f"{partial} cannot be written: {error.strerror or error}", hint="what came so far is kept"
        ) from error
    found = sha.hexdigest()
    if found != blob.sha256:
        partial.unlink(missing_ok=True)
        raise _damaged(store, blob, f"{done:,} bytes with SHA-256 {found}")


def upload(store: RemoteStore, local: Path, blob: Blob, tell: Tell = silent) -> None:
    """Copy a file into the store under the name of its content.

    Raises:
        EngineCorruptError: the file is not what the index says, or changed while it was read.
        TapeoutError: the store failed; nothing appears under the blob's name then.
    """
    before = local.stat()
    tell(f"{blob.name} checking {blob.size_bytes:,} bytes")
    with local.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.sha256:
        raise EngineCorruptError(
            f"{local} has SHA-256 {found}, its index says {blob.sha256}",
            hint="build the set again: the file is damaged, or newer than index.json",
        )
    path = store.blob_path(blob.sha256)
    store.put_file(local, path, _callback(blob, tell))
    after = local.stat()
    try:
        size = store.size_of(blob.sha256)
    except FileNotFoundError:
        size = 0
    changed = (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size)
    if changed or size != blob.size_bytes:
        store.remove(path)
        why = "the file changed meanwhile" if changed else f"{size} bytes arrived"
        raise EngineCorruptError(f"{local} could not be copied to {store.address.shown}: {why}")


def stored_sha256(store: RemoteStore, blob: Blob, tell: Tell = silent) -> str:
    """SHA-256 of a blob as the store has it, read whole."""
    path, sha, done = store.blob_path(blob.sha256), hashlib.sha256(), 0
    size = store.size_of(blob.sha256) or blob.size_bytes
    for data in _pieces(store, path, 0, size):
        sha.update(data)
        done += len(data)
        tell(f"{blob.name} reading back {done / max(size, 1):.0%} of {size:,} bytes")
    return sha.hexdigest()


def _resume(file: Any, sha: Any, blob: Blob, *, keep: bool) -> int:
    """Hash what an earlier attempt left, which ends where it stopped; returns its size in bytes."""
    file.seek(0, os.SEEK_END)
    if not keep or file.tell() > blob.size_bytes:
        file.truncate(0)
    file.seek(0)
    done = 0
    while data := file.read(PIECE_BYTES):
        sha.update(data)
        done += len(data)
    return done


def _pieces(store: RemoteStore, path: str, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a file from `begin` to `end` in order, fetched a few pieces ahead."""

    def fetch(at: int) -> bytes:
        stop = min(at + PIECE_BYTES, end)

        def read() -> bytes:
            data = bytes(store.fs.cat_file(path, start=at, end=stop))
            if len(data) != stop - at:
                raise EOFError(f"{len(data):,} bytes came for bytes {at:,} to {stop:,}")
            return data

        return store.attempt(read, f"reading {path}")

    waiting: deque[Future[bytes]] = deque()
    pool = ThreadPoolExecutor(PIECES, thread_name_prefix="tapeout-fetch")
    try:
        for at in range(begin, end, PIECE_BYTES):
            waiting.append(pool.submit(fetch, at))
            if len(waiting) == PIECES:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _stream(store: RemoteStore, path: str) -> Iterator[bytes]:
    """A file from its beginning, from a server that sends nothing but whole files."""
    try:
        with store.fs.open(path, "rb", block_size=0) as file:
            while data := file.read(PIECE_BYTES):
                yield data
    except (FileNotFoundError, TapeoutError):
        raise
    except Exception as error:
        raise TapeoutError(f"{store.address.shown}: reading {path} failed: {error}") from error


def _callback(blob: Blob, tell: Tell) -> Any:
    from fsspec.callbacks import Callback

    class Told(Callback):
        def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
            tell(f"{blob.name} {self.value / max(blob.size_bytes, 1):.0%} of {blob.size_bytes:,} bytes")

    return Told(size=blob.size_bytes)
