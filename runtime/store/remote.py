"""A store as files: blobs named by their SHA-256, tags that point at an index among them.

    URL/blobs/sha256/<2 digits>/<64 digits>   an engine, a weight file, or the index of a set
    URL/tags/<tag>.json                       which index a tag means; written last, in one go

So a reader who has a tag has a whole set: whatever a push was doing when it stopped, no tag points there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine_set.index import EngineSetIndex, parse_index
from tapeout.runtime.store.address import SetAddress

T = TypeVar("T")

TAG_FORMAT, TAG_VERSION = "tapeout-set-tag", 1
#: Where a file appears whole or not at all by itself. Elsewhere it is written beside and renamed.
_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"}
_READ_ONLY = {"http", "https", "github", "zip", "tar"}
_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp",
    "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "sftp": "paramiko", "ssh": "paramiko",
}  # fmt: skip
#: Pauses before a failed read is tried again, in seconds.
_PAUSES = (0.5, 2.0, 5.0)
_SHA256_DIGITS = 64
_MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredSet:
    """A set that a tag points at: its index, as bytes too, and their SHA-256."""

    index: EngineSetIndex
    index_bytes: bytes
    sha256: str


class RemoteStore:
    """The place of one model's engine sets. Use `open_store`."""

    def __init__(self, address: SetAddress, fs: Any, root: str) -> None:
        self.address, self.fs, self.root = address, fs, root.rstrip("/")
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self.read_only = bool(protocols & _READ_ONLY)
        self._atomic = bool(protocols & _ATOMIC)
        self._http = bool(protocols & {"http", "https"})

    def blob_path(self, sha256: str) -> str:
        return f"{self.root}/blobs/sha256/{sha256[:2]}/{sha256}"

    def tag_path(self, tag: str) -> str:
        return f"{self.root}/tags/{tag}.json"

    # ---- reading ----------------------------------------------------------------------------

    def read_set(self) -> StoredSet:
        """The set that the address's tag points at.

        Raises:
            UsageError: no such tag. EngineError: tag or index are damaged or another version's.
            TapeoutError: the store cannot be reached.
        """
        where = f"{self.address.shown}: tag {self.address.tag!r}"
        try:
            data = self.read(self.tag_path(self.address.tag))
        except FileNotFoundError:
            raise self._no_tag() from None
        sha256, size_bytes = _parse_tag(data, where)
        try:
            text = self.read(self.blob_path(sha256))
        except FileNotFoundError:
            raise EngineCorruptError(
                f"{where} points at the index {sha256}, which is not there", hint="push the set again"
            ) from None
        if len(text) != size_bytes or hashlib.sha256(text).hexdigest() != sha256:
            raise EngineCorruptError(
                f"{self.address.shown}: the index {self.blob_path(sha256)} does not match its SHA-256",
                hint="the store holds damaged data: push the set again with --verify",
            )
        return StoredSet(parse_index(text, f"{self.address.text()}: index.json"), text, sha256)

    def tags(self) -> list[str]:
        """All tags; empty where the store cannot list, as over HTTP."""
        try:
            names = self.fs.ls(f"{self.root}/tags", detail=False)
        except Exception:  # whatever a file system says when it cannot list
            return []
        files = [str(name).rsplit("/", 1)[-1] for name in names]
        return sorted(n.removesuffix(".json") for n in files if n.endswith(".json") and n[0] != ".")

    def blobs(self) -> dict[str, Any]:
        """Every file below blobs/, unfinished ones too, with what the file system says of it."""
        self.fs.invalidate_cache()
        return self.attempt(lambda: dict(self.fs.find(f"{self.root}/blobs", detail=True)), "listing blobs")

    def read(self, path: str) -> bytes:
        """A small file. Raises FileNotFoundError, or TapeoutError after several attempts."""
        return self.attempt(lambda: bytes(self.fs.cat_file(path)), f"reading {path}")

    def size_of(self, sha256: str) -> int | None:
        """Bytes of a blob, None where the store cannot tell; FileNotFoundError when it is not there."""
        path = self.blob_path(sha256)
        self.fs.invalidate_cache()
        size = self.attempt(lambda: self.fs.info(path), f"looking at {path}").get("size")
        return None if size is None else int(size)

    def has_ranges(self, path: str, size_bytes: int) -> bool:
        """Whether parts of a file can be read: a web server may send the whole file for every part."""
        if not self._http or size_bytes < 2:
            return True

        def probe() -> bool:
            with self.fs.open(path, "rb", size=size_bytes, cache_type="none") as file:
                file.seek(1)
                try:
                    return len(file.read(1)) == 1
                except ValueError:  # fsspec's word for it
                    return False

        return self.attempt(probe, f"reading {path}")

    def attempt(self, call: Callable[[], T], doing: str) -> T:
        """What `call` returns; failures that may pass are tried again.

        Raises FileNotFoundError as it is, everything else as a TapeoutError.
        """
        for pause in (*_PAUSES, None):
            try:
                return call()
            except (FileNotFoundError, TapeoutError):
                raise
            except Exception as error:  # every backend has exceptions of its own
                if pause is None or isinstance(error, PermissionError):
                    raise self._failure(doing, error) from error
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    # ---- writing ----------------------------------------------------------------------------

    def check_writable(self) -> None:
        if self.read_only:
            raise UsageError(
                f"{self.address.shown} can only be read",
                hint="push to the storage behind it (s3://, gs://, a directory) and pull from here",
            )

    def put_file(self, local: Path, path: str, callback: Any) -> None:
        """Copy a file into the store: it appears there whole or not at all."""
        with self._writing(path) as target:
            self.fs.put_file(str(local), target, callback=callback)

    def put_bytes(self, data: bytes, path: str) -> None:
        """The same for a small file, which replaces what is there."""
        with self._writing(path) as target:
            self.fs.pipe_file(target, data)

    def remove(self, path: str) -> None:
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failure(f"removing {path}", error) from error

    @contextmanager
    def _writing(self, path: str) -> Iterator[str]:
        """The name to write to; on the way out it is `path`, or gone."""
        self.check_writable()
        folder, _, name = path.rpartition("/")
        target = path if self._atomic else f"{folder}/.{name[:32]}.{secrets.token_hex(8)}.tmp"
        try:
            if not self._atomic:
                self.fs.makedirs(folder, exist_ok=True)
            yield target
            if not self._atomic:
                _sync(target)
                self.fs.mv(target, path)
        except TapeoutError:
            raise
        except Exception as error:
            raise self._failure(f"writing {path}", error) from error
        finally:
            if not self._atomic:
                with suppress(Exception):  # it has been renamed, or the first error is the one to tell
                    self.fs.rm_file(target)

    def _failure(self, doing: str, error: Exception) -> TapeoutError:
        text = " ".join(str(error).split()) or "no message"
        if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
            return UsageError(
                f"{self.address.shown}: {doing} is not allowed: {type(error).__name__}: {text}",
                hint="check the URL and the credentials: a push needs a place that may be written",
            )
        return TapeoutError(
            f"{self.address.shown}: {doing} failed: {type(error).__name__}: {text}",
            hint="check the URL, the credentials and the network; the same command goes on where it stopped",
        )

    def _no_tag(self) -> UsageError:
        known = self.tags()
        there = f"it has {', '.join(known)}" if known else "there may be no engine set at all"
        return UsageError(
            f"{self.address.shown} has no tag {self.address.tag!r}: {there}",
            hint="`tapeout push DIR URL --tag TAG` writes one",
        )


def open_store(address: SetAddress) -> RemoteStore:
    """The store at an address. Nothing is read yet.

    Raises:
        UsageError: the URL's scheme is unknown, or a package it needs is not installed.
    """
    try:
        import fsspec
    except ImportError:
        raise UsageError(
            f"{address.shown}: stores need fsspec, which is not installed",
            hint="pip install 'tapeout[store]'",
        ) from None
    scheme = address.url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(address.url)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise UsageError(
            f"{address.shown}: {scheme}:// needs {package or 'a package'} that is not installed ({error})",
            hint=f"pip install {package or 'what it names'}",
        ) from None
    except ValueError as error:
        if "rotocol not known" not in str(error):
            raise UsageError(f"{address.shown} is not a URL that fsspec takes: {error}") from None
        raise UsageError(
            f"{address.shown}: no store is known for {scheme}://",
            hint="s3://, gs://, https://, file:// and whatever else fsspec has a file system for",
        ) from None
    return RemoteStore(address, fs, root)


def _parse_tag(data: bytes, where: str) -> tuple[str, int]:
    """SHA-256 and size of the index that a tag's file points at."""
    try:
        tag = json.loads(data)
        if tag["format"] != TAG_FORMAT:
            raise ValueError("another format")
        version = tag["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EngineCorruptError(
            f"{where} is not a tag of an engine set", hint="push the set again"
        ) from None
    if version != TAG_VERSION:
        raise EngineIncompatibleError(
            f"{where} has version {version!r} of the tag format, this tapeout reads {TAG_VERSION}",
            hint="use the tapeout that pushed it, or push it again with this one",
        )
    sha256, size = tag.get("index"), tag.get("size_bytes")
    sound = (
        isinstance(sha256, str)
        and len(sha256) == _SHA256_DIGITS
        and not set(sha256) - set("0123456789abcdef")
    )
    if not sound or type(size) is not int or not 0 < size <= _MAX_INDEX_BYTES:
        raise EngineCorruptError(f"{where} points at no index", hint="push the set again")
    return str(sha256), size


def tag_bytes(index_sha256: str, size_bytes: int) -> bytes:
    """The file of a tag that points at an index."""
    tag = {
        "format": TAG_FORMAT, "format_version": TAG_VERSION, "index": index_sha256, "size_bytes": size_bytes,
    }  # fmt: skip
    return (json.dumps(tag, indent=1) + "\n").encode()


def _sync(path: str) -> None:
    """Bring a file of this machine to its disk before it gets its name."""
    with suppress(OSError):  # it is no file of this machine
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
