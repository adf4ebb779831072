"""One file of ours on disk: opened, its header checked, mapped, read; nothing copied."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError
from tapeout.runtime.engine.container import FORMAT, MAGIC, REBUILD, Entry, Layout, parse_entries
from tapeout.runtime.engine.in_use import mark_in_use
from tapeout.runtime.engine.integrity import Verifier
from tapeout.runtime.engine.manifest import FORMAT_VERSION

#: The kind of file that `tapeout build --pack` writes.
PACK = "pack"
_FROM_PACK = (
    "time it on the GPU with `tapeout time PACK -o CACHE.json`, then build with --timing-cache CACHE.json"
)
WRONG_FILE = "pass the file that `tapeout build -o FILE` wrote"


class MappedFile:
    """One checked safetensors file of ours: metadata, layout, bytes."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            mark_in_use(self._fd)
            self.file_bytes = os.fstat(self._fd).st_size
            self.metadata, self.layout = _parse(self._fd, self.file_bytes, kind, str(path))
            self.verifier = Verifier(self.layout, self._read_at, str(path))
            self.verifier.check_header()
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
            self._view = memoryview(self._map)
        except BaseException:
            os.close(self._fd)
            raise

    def bytes_of(self, entry: Entry) -> memoryview:
        return self._view[entry.begin : entry.end]

    def advise(self, advice: int, begin: int, end: int) -> None:
        """`madvise` over the whole memory pages inside `[begin, end)` (partly covered ones stay)."""
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(advice, first, length)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` from the file, past the mapping: no page faults, the GIL is free meanwhile."""
        done = 0
        while done < len(into):
            size = os.preadv(self._fd, [into[done:]], offset + done)
            if size == 0:
                raise EngineCorruptError(f"{self.path} is truncated at byte {offset + done}", hint=REBUILD)
            done += size

    def close(self) -> None:
        """Tensors over the mapping keep it alive; it goes when the last of them does."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()

    def _read_at(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            part = os.pread(self._fd, size, offset)
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _parse(fd: int, file_bytes: int, kind: str, where: str) -> tuple[Mapping[str, str], Layout]:
    """Metadata and layout. Looks at nothing else than the header."""
    start = os.pread(fd, 8 + len(MAGIC), 0)
    length = int.from_bytes(start[:8], "little")
    ours = start[8:] == MAGIC
    if length > file_bytes - 8:
        if ours:
            raise EngineCorruptError(
                f"{where} is truncated: {file_bytes} bytes, its header alone has {length}",
                hint=REBUILD,
            )
        raise _no_engine(where, "it is not a safetensors file")
    header = os.pread(fd, 8 + length, 0)
    try:
        table = json.loads(header[8:].decode())
        metadata = dict(table["__metadata__"])
        foreign = metadata.get("format") != FORMAT
    except (KeyError, TypeError, ValueError, RecursionError):
        if ours:
            raise EngineCorruptError(f"{where}: the header is damaged", hint=REBUILD) from None
        raise _no_engine(where, "its header holds no metadata of ours") from None
    if foreign:
        raise _no_engine(where, f"it is a safetensors file of format {metadata.get('format')!r}")
    if metadata.get("kind") == PACK:  # which counts versions of its own
        raise EngineCorruptError(f"{where} is not a tapeout engine: it is a pack of tactics", hint=_FROM_PACK)
    # Before anything else: what another version calls damage is only another layout.
    version = metadata.get("format_version")
    if not isinstance(version, str) or not version.isdecimal():
        raise EngineCorruptError(f"{where}: the header is damaged: format version {version!r}", hint=REBUILD)
    if version != str(FORMAT_VERSION):
        raise other_version(where, version)
    if metadata.get("kind") != kind:
        raise _no_engine(where, f"it holds {metadata.get('kind')!r}, expected {kind!r}")
    return metadata, parse_entries(header, table, file_bytes, where)


def _no_engine(where: str, why: str) -> EngineCorruptError:
    return EngineCorruptError(f"{where} is not a tapeout engine: {why}", hint=WRONG_FILE)


def other_version(where: str, found: str) -> EngineIncompatibleError:
    """What is raised about a file in another version's format."""
    return EngineIncompatibleError(
        f"{where} has engine format {found}, this tapeout reads format {FORMAT_VERSION}",
        hint=f"rebuild it with this version: tapeout build MODEL -o {Path(where).name}",
    )
