"""Metadata and tensor table of a GGUF file, read through one memory map.

Format (versions 2 and 3, little endian): magic, version, counts; key/value metadata; tensor table;
data aligned to `general.alignment`. transformers and gguf have readers too: gguf's takes most of a
minute for a 50k vocabulary and transformers' raises bare parser errors on damaged files.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize

from tapeout.plugins.errors import UnsupportedError, UsageError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_JOINED_ROWS = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: `shape` in row-major order, bytes `[start, start + nbytes)`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed GGUF file. `metadata` holds plain Python values; arrays are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def quantization(self) -> str:
        """The file's quantization by its usual name, for example `Q4_1` or `Q4_K_M`."""
        file_type = self.metadata.get("general.file_type")
        if isinstance(file_type, int) and file_type in LlamaFileType._value2member_map_:
            return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        types = [t.type for t in self.tensors.values()]
        return max(set(types), key=types.count).name

    def dequantize(self, name: str) -> np.ndarray:
        """One tensor as float32 of its shape; the map is closed again."""
        tensor = self.tensors[name]
        data = np.memmap(self.path, mode="r", dtype=np.uint8, offset=tensor.start, shape=(tensor.nbytes,))
        if tensor.type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            plain = np.float32 if tensor.type == GGMLQuantizationType.F32 else np.float16
            return np.array(data.view(plain).reshape(tensor.shape), dtype=np.float32)
        # gguf works in groups of 16 rows; with rows joined (blocks never span them) and without
        # memmap's own slicing it spends its time on values: a third of the seconds.
        num_rows = math.prod(tensor.shape[:-1])
        rows = data.view(np.ndarray).reshape(num_rows // math.gcd(num_rows, _JOINED_ROWS), -1)
        return np.ascontiguousarray(dequantize(rows, tensor.type), dtype=np.float32).reshape(tensor.shape)


@functools.cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package turns blocks of this type into values."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_gguf(path: Path) -> GgufFile:
    """Parse and check a GGUF file; its tensor data is not touched.

    Errors: UsageError when it is not a GGUF file, is truncated or inconsistent (all offending
    tensors at once); UnsupportedError for another format version or tensor types.
    """
    size = path.stat().st_size
    if size < 24:
        raise UsageError(f"{path} is truncated: {size} bytes, a GGUF file has at least 24", hint=_DOWNLOAD)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        if blob[:4] != MAGIC:
            raise UsageError(
                f"{path} is not a GGUF file: it starts with {bytes(blob[:4])!r}, expected {MAGIC!r}",
                hint=_DOWNLOAD,
            )
        version, tensor_count, metadata_count = struct.unpack_from("<IQQ", blob, 4)
        if version not in VERSIONS:
            raise UnsupportedError(
                f"{path} is GGUF version {version}; supported are {VERSIONS[0]} and {VERSIONS[1]}"
                + (" (it may be big endian)" if version >= 1 << 16 else ""),
                hint="convert it again with a current llama.cpp",
            )
        try:
            metadata, pos = _read_metadata(blob, metadata_count)
            entries, pos = _read_tensor_table(blob, tensor_count, pos)
        except (struct.error, IndexError, UnicodeDecodeError, EOFError) as error:
            raise UsageError(
                f"{path} is truncated or damaged: its metadata or tensor table does not parse ({error})",
                hint=_DOWNLOAD,
            ) from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise UsageError(f"{path} has no general.architecture in its metadata", hint=_DOWNLOAD)
    return GgufFile(path, metadata, _place_tensors(path, size, metadata, entries, pos))


_DOWNLOAD = "download the file again; a partial download or a git-lfs pointer looks like this"


def _read_string(blob: mmap.mmap, pos: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", blob, pos)
    pos += 8
    if length > len(blob) - pos:
        raise EOFError(f"a string of {length} bytes at byte {pos} passes the end of the file")
    return blob[pos : pos + length].decode("utf-8"), pos + length


def _read_metadata(blob: mmap.mmap, count: int) -> tuple[dict[str, Any], int]:
    metadata: dict[str, Any] = {}
    pos = 24
    for _ in range(count):
        key, pos = _read_string(blob, pos)
        (value_type,) = struct.unpack_from("<I", blob, pos)
        metadata[key], pos = _read_value(blob, pos + 4, value_type)
    return metadata, pos


def _read_value(blob: mmap.mmap, pos: int, value_type: int) -> tuple[Any, int]:
    if value_type in _SCALARS:
        code = "<" + _SCALARS[value_type]
        return struct.unpack_from(code, blob, pos)[0], pos + struct.calcsize(code)
    if value_type == _STRING:
        return _read_string(blob, pos)
    if value_type != _ARRAY:
        raise EOFError(f"unknown value type {value_type} at byte {pos}")
    element_type, count = struct.unpack_from("<IQ", blob, pos)
    pos += 12
    if count > len(blob) - pos:
        raise EOFError(f"an array of {count} elements at byte {pos} passes the end of the file")
    if element_type in _SCALARS:
        code = f"<{count}{_SCALARS[element_type]}"
        return list(struct.unpack_from(code, blob, pos)), pos + struct.calcsize(code)
    values = []
    for _ in range(count):
        value, pos = _read_value(blob, pos, element_type)
        values.append(value)
    return values, pos


def _read_tensor_table(
    blob: mmap.mmap, count: int, pos: int
) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """`(name, row-major shape, ggml type, offset into the data)` of every tensor."""
    entries = []
    for _ in range(count):
        name, pos = _read_string(blob, pos)
        (dims,) = struct.unpack_from("<I", blob, pos)
        if dims > 8:
            raise EOFError(f"tensor {name!r} has {dims} dimensions")
        shape = struct.unpack_from(f"<{dims}Q", blob, pos + 4)
        pos += 4 + 8 * dims
        ggml_type, offset = struct.unpack_from("<IQ", blob, pos)
        pos += 12
        entries.append((name, tuple(reversed(shape)), ggml_type, offset))
    return entries, pos


def _place_tensors(
    path: Path,
    size: int,
    metadata: Mapping[str, Any],
    entries: list[tuple[str, tuple[int, ...], int, int]],
    pos: int,
) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise UsageError(
            f"{path}: general.alignment is {alignment!r}, expected a positive integer", hint=_DOWNLOAD
        )
    data_start = -(-pos // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    unknown: list[str] = []
    problems: list[str] = []
    for name, shape, type_id, offset in entries:
        if type_id not in GGMLQuantizationType._value2member_map_:
            unknown.append(f"  tensor {name!r} has ggml type {type_id}")
            continue
        kind = GGMLQuantizationType(type_id)
        if not can_dequantize(kind):
            unknown.append(
                f"  tensor {name!r} has type {kind.name}, which the gguf package cannot dequantize"
            )
            continue
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if shape and shape[-1] % block:
            problems.append(
                f"  tensor {name!r}: rows of {shape[-1]} are not a multiple of {kind.name}'s block of {block}"
            )
            continue
        start, nbytes = data_start + offset, elements // block * block_bytes
        if start + nbytes > size:
            problems.append(
                f"  truncated: tensor {name!r} ends at byte {start + nbytes}, the file has {size}"
            )
        if name in tensors:
            problems.append(f"  tensor {name!r} appears twice")
        tensors[name] = GgufTensor(name, shape, kind, start, nbytes)
    if problems:
        raise UsageError(f"{path} cannot be used:\n" + "\n".join(problems), hint=_DOWNLOAD)
    if unknown:
        raise UnsupportedError(
            f"{path} has tensors of types that cannot be read:\n" + "\n".join(unknown),
            hint="update the gguf package, or use another quantization of the model",
        )
    return tensors
