"""The bytes of an engine file: a safetensors file with checksums of all its parts.

    8 bytes   header length N, little endian
    N bytes   JSON header: `__metadata__` (format, version, kind, JSON texts), then the tensors;
              padded with spaces so that data starts at a multiple of 256
    weights/<name>     each at a multiple of 256 in the file, `padding/<n>` (u8) where needed
    kernels/<name>     u8
    segments/<name>    u8
    text/<name>        u8
    integrity/chunks   u64, xxh3_64 of each 4 MiB of the weight region
    integrity/sha256   u8 [rows, 32]: header with its length, weight region, shared weight file's
                       seal (zeros when there is none), then each kernel, segment and text in file order
    integrity/seal     u8 [32]: SHA-256 of the two tensors before it

Checksums stand at the end because weights are streamed after the header is written. The seal
covers every other checksum, so it also identifies the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.errors import EngineCorruptError
from tapeout.runtime.engine.manifest import FORMAT_VERSION

ALIGNMENT = 256  # of weights in the file and so on a device: what TensorRT wants of addresses
CHUNK_BYTES = 4 << 20
SHA_BYTES = 32
#: Rows of `integrity/sha256` before those of kernels and texts.
ROW_HEADER, ROW_WEIGHTS, ROW_SHARED, FIXED_ROWS = 0, 1, 2, 3
#: Sections of bytes with a SHA-256 row of their own, in file order.
BLOBS = ("kernels", "segments", "text")
FORMAT = "tapeout"
KIND_ENGINE, KIND_WEIGHTS = "engine", "weights"
#: The hint of every error about a damaged file.
REBUILD = "copy or build the engine again"
#: The first bytes of every header, so that a truncated engine is told from a foreign file.
MAGIC = b'{"__metadata__":{"format":"' + FORMAT.encode() + b'"'

#: dtype name to safetensors' name and bytes per element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
}
_NAMES = {code: (name, size) for name, (code, size) in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file; `begin` and `end` are absolute file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Layout:
    """Where everything stands. `header` includes the length and the padding."""

    header: bytes
    entries: Mapping[str, Entry]  # in file order
    file_bytes: int

    def section(self, prefix: str) -> list[Entry]:
        """Entries under `prefix/`, in file order."""
        return [e for name, e in self.entries.items() if name.startswith(prefix + "/")]

    @property
    def weight_region(self) -> tuple[int, int]:
        """File offsets of all weights with the padding between them; empty without weights."""
        begin = len(self.header)
        return begin, max(
            (e.end for e in self.section("weights")),
            default=begin,
        )

    @property
    def hashed(self) -> list[Entry]:
        """Kernels, segments, texts: the entries with a SHA-256 row of their own, in row order."""
        return [entry for name in BLOBS for entry in self.section(name)]

    def sizes(self) -> dict[str, int]:
        """Bytes by section; they add up to the file."""
        sizes = {"header": len(self.header)}
        for key in ("weights", "padding", *BLOBS, "integrity"):
            sizes[key] = sum(e.size_bytes for e in self.section(key))
        return sizes


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor; KeyError when the format has no such dtype."""
    return math.prod(shape) * DTYPES[dtype][1]


def plan_layout(
    kind: str,
    metadata: Mapping[str, str],
    weights: Mapping[str, tuple[str, tuple[int, ...]]],
    blobs: Mapping[str, int],
    header_bytes: int = 0,
) -> Layout:
    """Lay out a file before any weight exists; the header is padded to `header_bytes` or more.

    `weights` maps names to dtype and shape and keeps their order (that of first use, so that
    loading reads forward); `blobs` maps `kernels/<name>`, `segments/<name>` and `text/<name>` to
    sizes.
    """
    tensors: list[tuple[str, str, tuple[int, ...], int]] = []
    at = 0
    for name, (dtype, shape) in weights.items():
        if at % ALIGNMENT:
            pad = -at % ALIGNMENT
            tensors.append((f"padding/{len(tensors)}", "uint8", (pad,), at))
            at += pad
        tensors.append((f"weights/{name}", dtype, shape, at))
        at += tensor_bytes(dtype, shape)
    chunks = -(-at // CHUNK_BYTES)
    order = {name: place for place, name in enumerate(BLOBS)}
    rest: list[tuple[str, str, tuple[int, ...]]] = [
        (name, "uint8", (size,))
        for name, size in sorted(blobs.items(), key=lambda b: (order[b[0].split("/")[0]], b[0]))
    ]
    rest += [
        ("integrity/chunks", "uint64", (chunks,)),
        ("integrity/sha256", "uint8", (FIXED_ROWS + len(blobs), SHA_BYTES)),
        ("integrity/seal", "uint8", (SHA_BYTES,)),
    ]
    for name, dtype, shape in rest:
        tensors.append((name, dtype, shape, at))
        at += tensor_bytes(dtype, shape)
    header = _header(kind, metadata, tensors, header_bytes)
    base = len(header)
    entries = {n: Entry(n, d, s, base + o, base + o + tensor_bytes(d, s)) for n, d, s, o in tensors}
    return Layout(header, entries, base + at)


def _header(
    kind: str,
    metadata: Mapping[str, str],
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    least_bytes: int,
) -> bytes:
    table: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "kind": kind, "format_version": str(FORMAT_VERSION), **metadata}
    }
    for name, dtype, shape, begin in tensors:
        end = begin + tensor_bytes(dtype, shape)
        table[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(least_bytes - 8)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse_entries(header: bytes, table: Mapping[str, Any], file_bytes: int, where: str) -> Layout:
    """The layout a header describes, checked: no hole, no overlap, nothing beyond the file.

    `table` is the header's JSON. Raises EngineCorruptError; a file that ends early is called
    truncated, with both sizes.
    """
    base, at, entries = len(header), 0, {}
    try:
        for name, spec in table.items():
            if name == "__metadata__":
                continue
            dtype, item = _NAMES[spec["dtype"]]
            shape = tuple(spec["shape"])
            begin, end = spec["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or set(spec) != _ENTRY_KEYS:
                raise ValueError(f"{name} is not a tensor entry")
            if begin != at or end - begin != math.prod(shape) * item:
                raise ValueError(
                    f"{name} has offsets [{begin}, {end}) where {at} was expected for {spec['shape']}"
                )
            entries[name] = Entry(name, dtype, shape, base + begin, base + end)
            at = end
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineCorruptError(f"{where}: the header is damaged: {error}", hint=REBUILD) from None
    if file_bytes != base + at:
        state = "truncated" if file_bytes < base + at else "longer than its header says"
        raise EngineCorruptError(
            f"{where} is {state}: {file_bytes} bytes, expected {base + at}", hint=REBUILD
        )
    return Layout(header, entries, base + at)


_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
