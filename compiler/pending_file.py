"""A file of ours being written: under a temporary name, weights streamed, whole or gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tapeout.compiler.files import remove_leftovers, sync_directory, temporary_file
from tapeout.compiler.weight_stream import made_ahead
from tapeout.model_defs.weights import Read, WeightRef
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.container import SHA_BYTES, Layout
from tapeout.runtime.engine.integrity import WeightChecksums, integrity_section

#: Told (bytes written, bytes in all) after every tensor.
Progress = Callable[[int, int], None]

#: In the place of the seal of a shared weight file, where there is none.
NO_SEAL = bytes(SHA_BYTES)

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class PendingFile:
    """A file being written under a temporary name, section by section."""

    def __init__(self, path: Path, layout: Layout, blobs: Mapping[str, bytes], shared_seal: bytes) -> None:
        remove_leftovers(path)
        _check_space(path, layout.file_bytes)
        self.path, self.layout = path, layout
        self._blobs, self._shared_seal = blobs, shared_seal
        self._stack = contextlib.ExitStack()
        with self.failing_cleanly():
            self.temporary, self._file = self._stack.enter_context(temporary_file(path))

    @contextlib.contextmanager
    def failing_cleanly(self) -> Iterator[None]:
        """On any failure the temporary file goes; errors of the disk become ours."""
        try:
            yield
        except OSError as error:
            self.close()
            if error.errno in _DISK_FULL:
                raise _disk_full(self.path, self.layout.file_bytes) from None
            raise TapeoutError(f"{self.path} could not be written: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def write_sections(self, weights: Mapping[str, WeightRef], read: Read, progress: Progress | None) -> None:
        """Header, weights and blobs: all but the integrity section."""
        checksums = WeightChecksums()
        self._file.write(self.layout.header)
        with contextlib.closing(made_ahead(weights, read)) as made, ThreadPoolExecutor(1) as writer:
            for entry in self.layout.entries.values():
                section, _, name = entry.name.partition("/")
                if section == "integrity":
                    continue
                if section == "weights":
                    self._write_weight(name, made, checksums, writer)
                elif section == "padding":
                    checksums.update(bytes(entry.size_bytes))
                    self._file.write(bytes(entry.size_bytes))
                else:
                    self._file.write(self._blobs[entry.name])
                if progress is not None:
                    progress(entry.end, self.layout.file_bytes)
        self._checksums = checksums.finish()
        self._integrity_at = self._file.tell()

    def _write_weight(
        self,
        name: str,
        made: Iterator[tuple[str, np.ndarray]],
        checksums: WeightChecksums,
        writer: ThreadPoolExecutor,
    ) -> None:
        """The next weight, written while it is hashed: both leave the interpreter lock."""
        made_name, array = next(made)
        if made_name != name:
            raise AssertionError(f"weight {made_name} was made where {name} was laid out")
        data = array.reshape(-1).view(np.uint8).data  # bfloat16 arrays have no buffer protocol
        written = writer.submit(self._file.write, data)
        checksums.update(data)
        written.result()

    def replace_header(self, layout: Layout) -> None:
        """Write a header of the same length over the first one."""
        if len(layout.header) != len(self.layout.header):
            raise TapeoutError(
                f"the final manifest takes a header of {len(layout.header)} bytes, "
                f"{len(self.layout.header)} are reserved",
                hint="the verdict is too long for the manifest; figures belong in the report",
            )
        self.layout = layout
        self._file.seek(0)
        self._file.write(layout.header)

    def write_integrity(self) -> bytes:
        """Checksums of all that was written, synced to disk; returns the seal."""
        hashed = [self._blobs[e.name] for e in self.layout.hashed]
        section, seal = integrity_section(self.layout.header, *self._checksums, self._shared_seal, hashed)
        self._file.seek(self._integrity_at)
        self._file.write(section)
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._file.tell() != self.layout.file_bytes:
            raise AssertionError(f"{self._file.tell()} bytes written, {self.layout.file_bytes} were laid out")
        return seal

    def rename(self, path: Path | None = None) -> None:
        """Give the file its name: the one it was begun for, or another in the same directory."""
        self.path = path or self.path
        self.temporary.replace(self.path)
        sync_directory(self.path.parent)
        self.close()

    def close(self) -> None:
        """Remove the temporary file unless it was renamed."""
        with contextlib.suppress(OSError):  # a full disk fails again when the rest is flushed
            self._stack.close()


def _check_space(path: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise _disk_full(path, needed_bytes, free)


def _disk_full(path: Path, needed_bytes: int, free_bytes: int | None = None) -> TapeoutError:
    free = shutil.disk_usage(path.parent).free if free_bytes is None else free_bytes
    return TapeoutError(
        f"no space left for {path}: it takes {needed_bytes:,} bytes, {free:,} are free in {path.parent}",
        hint="free some space or write to another disk; nothing was left behind",
    )
