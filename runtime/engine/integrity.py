"""Checksums of an engine file: made while it is written, compared when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import xxhash

from tapeout.plugins.errors import EngineCorruptError
from tapeout.runtime.engine.container import (
    CHUNK_BYTES,
    FIXED_ROWS,
    REBUILD,
    ROW_HEADER,
    ROW_SHARED,
    ROW_WEIGHTS,
    SHA_BYTES,
    Layout,
)

#: Reads `(offset, size)` from the file; fewer bytes at its end.
ReadAt = Callable[[int, int], bytes | memoryview]


class WeightChecksums:
    """Streams the weight region: a 64-bit xxh3 per 4 MiB and one SHA-256."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._chunk = xxhash.xxh3_64()
        self._in_chunk = 0
        self._chunks: list[int] = []

    def update(self, data: memoryview | bytes) -> None:
        """Bytes in file order; any split gives the same result."""
        view = memoryview(data)
        self._sha.update(view)
        while view:
            part = view[: CHUNK_BYTES - self._in_chunk]
            self._chunk.update(part)
            self._in_chunk += len(part)
            view = view[len(part) :]
            if self._in_chunk == CHUNK_BYTES:
                self._finish_chunk()

    def finish(self) -> tuple[bytes, bytes]:
        """Contents of `integrity/chunks` and the region's SHA-256."""
        if self._in_chunk:
            self._finish_chunk()
        return np.array(self._chunks, "<u8").tobytes(), self._sha.digest()

    def _finish_chunk(self) -> None:
        self._chunks.append(self._chunk.intdigest())
        self._chunk.reset()
        self._in_chunk = 0


def integrity_section(
    header: bytes, chunks: bytes, weights_sha: bytes, shared_seal: bytes, hashed: list[bytes]
) -> tuple[bytes, bytes]:
    """The bytes of the three integrity tensors, and the seal alone."""
    rows = [
        hashlib.sha256(header).digest(),
        weights_sha,
        shared_seal,
        *(hashlib.sha256(b).digest() for b in hashed),
    ]
    table = chunks + b"".join(rows)
    seal = hashlib.sha256(table).digest()
    return table + seal, seal


class Verifier:
    """Compares a file with its checksums. Every failure is an EngineCorruptError that names the part."""

    def __init__(self, layout: Layout, read_at: ReadAt, where: str) -> None:
        self._layout, self._read_at, self._where = layout, read_at, where
        names = ("integrity/chunks", "integrity/sha256", "integrity/seal")
        entries = [layout.entries.get(name) for name in names]
        begin, end = layout.weight_region
        expected = [
            -(-(end - begin) // CHUNK_BYTES) * 8,
            (FIXED_ROWS + len(layout.hashed)) * SHA_BYTES,
            SHA_BYTES,
        ]
        if [e and e.size_bytes for e in entries] != expected or list(layout.entries)[-3:] != list(names):
            raise EngineCorruptError(f"{where}: the checksum section is damaged", hint=REBUILD)
        self._chunks, self._rows, self.seal = (bytes(self._read(e.begin, e.size_bytes)) for e in entries if e)
        self._expected: list[int] = np.frombuffer(self._chunks, "<u8").tolist()

    def check_header(self) -> None:
        """The checksum section against its seal, then header, program and manifest."""
        if hashlib.sha256(self._chunks + self._rows).digest() != self.seal:
            raise self._corrupt("the checksum section")
        if hashlib.sha256(self._layout.header).digest() != self._row(ROW_HEADER):
            raise self._corrupt("the header (manifest and program)")

    def check_blobs(self) -> None:
        """Kernels and texts."""
        for i, entry in enumerate(self._layout.hashed):
            if hashlib.sha256(self._read(entry.begin, entry.size_bytes)).digest() != self._row(
                FIXED_ROWS + i
            ):
                raise self._corrupt(entry.name)

    def check_weights(self, *, full: bool = False) -> None:
        """Weights by chunk; `full` adds the region's SHA-256. Reads through one small buffer, so that
        checking a large engine does not count as memory of this process."""
        begin, end = self._layout.weight_region
        sha = hashlib.sha256()
        for at in range(begin, end, CHUNK_BYTES):
            data = self._read(at, min(CHUNK_BYTES, end - at))
            self.check_weight_bytes(at - begin, data)
            if full:
                sha.update(data)
        if full and sha.digest() != self._row(ROW_WEIGHTS):
            raise self._corrupt("the weights")

    def check_weight_bytes(self, offset: int, data: bytes | memoryview) -> None:
        """Whole chunks of the weight region, from `offset` bytes into it; any thread may call."""
        begin, _ = self._layout.weight_region
        for at in range(offset, offset + len(data), CHUNK_BYTES):
            chunk = memoryview(data)[at - offset : at - offset + CHUNK_BYTES]
            if xxhash.xxh3_64_intdigest(chunk) != self._expected[at // CHUNK_BYTES]:
                raise self._corrupt(self._weights_in(begin + at, begin + at + len(chunk)))

    @property
    def shared_seal(self) -> bytes:
        """Seal of the weight file this engine was written with; zeros when weights are embedded."""
        return self._row(ROW_SHARED)

    def _row(self, i: int) -> bytes:
        return self._rows[i * SHA_BYTES : (i + 1) * SHA_BYTES]

    def _read(self, at: int, size: int) -> bytes | memoryview:
        data = self._read_at(at, size)
        if len(data) != size:
            raise EngineCorruptError(
                f"{self._where} is truncated: no {size} bytes at offset {at}", hint=REBUILD
            )
        return data

    def _weights_in(self, begin: int, end: int) -> str:
        names = [e.name for e in self._layout.section("weights") if e.begin < end and e.end > begin]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{', '.join(names[:3]) or 'padding'}{more} (bytes {begin} to {end})"

    def _corrupt(self, what: str) -> EngineCorruptError:
        return EngineCorruptError(f"{self._where}: {what} does not match its checksum", hint=REBUILD)
