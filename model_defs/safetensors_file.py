"""Header and byte ranges of one safetensors file, checked before anything is read.

Format: 8 bytes little-endian header length, a JSON object of that length, then the data. Offsets
are relative to the data and must cover it without gap or overlap.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.model_defs.source import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
READ_CHUNK_BYTES = 16 << 20

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor and where its bytes lie: `[start, start + nbytes)` from the start of `path`."""

    info: TensorInfo
    path: Path
    start: int
    nbytes: int

    def renamed(self, name: str) -> FileTensor:
        """The same bytes under another name."""
        return replace(self, info=replace(self.info, name=name))

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes in pieces of at most 16 MiB."""
        return read_range(self.path, self.start, self.nbytes)

    def read(self) -> np.ndarray:
        """The tensor in host memory; the file is closed again and nothing is mapped."""
        raw = np.empty(self.nbytes, dtype=np.uint8)
        with self.path.open("rb", buffering=0) as file:
            view, done = raw.data, 0
            while done < self.nbytes:
                count = os.preadv(file.fileno(), [view[done:]], self.start + done)
                if not count:
                    raise _ended(self.path, self.start + done, self.start + self.nbytes)
                done += count
        return raw.view(np.dtype(self.info.dtype)).reshape(self.info.shape)


def read_range(path: Path, start: int, nbytes: int, chunk_bytes: int = READ_CHUNK_BYTES) -> Iterator[bytes]:
    """The bytes `[start, start + nbytes)` in pieces; EOFError when the file has become shorter."""
    fd = os.open(path, os.O_RDONLY)
    try:
        end = start + nbytes
        while start < end:
            chunk = os.pread(fd, min(chunk_bytes, end - start), start)
            if not chunk:
                raise _ended(path, start, end)
            yield chunk
            start += len(chunk)
    finally:
        os.close(fd)


def _ended(path: Path, at: int, end: int) -> EOFError:
    return EOFError(f"{path} ended at byte {at} while a tensor was read up to byte {end}")


def parse_header(path: Path) -> tuple[dict[str, FileTensor], list[str]]:
    """Tensors of a safetensors file by name, and everything that is wrong with it.

    Problems are sentences that start with the file's name; with any problem the tensors are
    only those whose entries are sound.
    """
    size = path.stat().st_size
    raw, problem = _header_bytes(path, size)
    if problem is not None:
        return {}, [f"{path.name}: {problem}"]
    try:
        entries = json.loads(raw, object_pairs_hook=_object_without_duplicates)
    except ValueError as error:  # also JSONDecodeError and UnicodeDecodeError
        return {}, [f"{path.name}: the header is not valid JSON ({error})"]
    if not isinstance(entries, dict):
        return {}, [f"{path.name}: the header is a JSON {type(entries).__name__}, expected an object"]
    entries.pop("__metadata__", None)
    tensors: dict[str, FileTensor] = {}
    problems: list[str] = []
    for name, entry in entries.items():
        parsed = _parse_entry(path, name, entry, data_start=8 + len(raw))
        if isinstance(parsed, str):
            problems.append(f"{path.name}: tensor {name!r}: {parsed}")
        else:
            tensors[name] = parsed
    if not problems:
        problems = [f"{path.name}: {p}" for p in _coverage_problems(tensors, 8 + len(raw), size)]
    return tensors, problems


def _header_bytes(path: Path, size: int) -> tuple[bytes, str | None]:
    if size < 8:
        return b"", f"truncated: {size} bytes, a safetensors file has at least 8"
    with path.open("rb") as file:
        head = file.read(8)
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            what = "a git-lfs pointer, not the file" if head == b"version " else "not a safetensors file"
            return b"", f"{what}: header length {length} is above the limit of {MAX_HEADER_BYTES} bytes"
        if 8 + length > size:
            return b"", f"truncated: the header needs {8 + length} bytes, the file has {size}"
        return file.read(length), None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> FileTensor | str:
    """The tensor, or what is wrong with its header entry."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return f"expected dtype, shape and data_offsets, got {entry!r}"
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        return f"unknown dtype {entry['dtype']!r}, expected one of {', '.join(DTYPES)}"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape):
        return f"shape {shape!r} is not a list of non-negative integers"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} is not a pair begin <= end"
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        spanned = offsets[1] - offsets[0]
        return f"{entry['dtype']} {shape} needs {nbytes} bytes, data_offsets {offsets} span {spanned}"
    return FileTensor(TensorInfo(name, dtype.name, tuple(shape)), path, data_start + offsets[0], nbytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _coverage_problems(tensors: dict[str, FileTensor], data_start: int, size: int) -> list[str]:
    """Overlaps, gaps, data past the end of the file and bytes that belong to no tensor."""
    problems: list[str] = []
    end, previous = data_start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        name = tensor.info.name
        if tensor.start < end:
            problems.append(f"tensor {name!r} overlaps {previous} by {end - tensor.start} bytes")
        elif tensor.start > end:
            problems.append(f"{tensor.start - end} unused bytes between {previous} and tensor {name!r}")
        if tensor.start + tensor.nbytes > size:
            problems.append(
                f"truncated: tensor {name!r} ends at byte {tensor.start + tensor.nbytes}, the file has {size}"
            )
        if tensor.start + tensor.nbytes >= end:
            end, previous = tensor.start + tensor.nbytes, f"tensor {name!r}"
    if size > end:
        problems.append(f"{size - end} bytes after the last tensor belong to none")
    return problems
