"""The bytes of a pack: a safetensors file of three compressed tensors, or four.

    8 bytes   header length N, little endian
    N bytes   JSON header: `__metadata__` (format, kind, pack_version, sha256 of what follows), then
              the tensors `entries` (JSON), `numbers` (float32) and `cubins`, all u8 and compressed,
              and `segments` where the pack has some

Cubins are stored once each, in one stream sorted by kernel: variants of one kernel share most of
their bytes. Of the standard library's codecs xz sees that, because its window spans the whole stream:
on 670 cubins (10.0 MB) it leaves 0.76 MB, against 1.5 MB of one zlib stream and 2.5 to 3.2 MB of xz,
bz2 or zlib file by file. Unpacking takes 0.06 s, and the loss of access to single cubins costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.tactic_timer.pack import PACK_VERSION, SEGMENTS_PACK_VERSION, Pack

_FORMAT, _KIND = "tapeout", "pack"
_TENSORS, _SEGMENTS = ("entries", "numbers", "cubins"), "segments"
_PRESET = 6
_MAX_HEADER_BYTES = 1 << 20
_AGAIN = "make the pack again: tapeout build MODEL --target TARGET --pack FILE"


@dataclass(frozen=True)
class PackFile:
    """A pack with its bulk: cubins by blob name, the float32 numbers that entries refer to, and TensorRT
    engines by blob name."""

    pack: Pack
    cubins: Mapping[str, bytes]
    numbers: np.ndarray
    plans: Mapping[str, bytes] = field(default_factory=dict)


def encode_pack(file: PackFile) -> bytes:
    """The whole file; the same for the same pack."""
    order = sorted(file.cubins, key=lambda blob: (_symbol(file.pack, blob), blob))
    cubins = [[blob, len(file.cubins[blob])] for blob in order]
    index: dict[str, Any] = {"cubins": cubins, "pack": file.pack.to_json()}
    plans = [file.plans[packed.segment.blob] for packed in file.pack.segments]
    if plans:
        index["plans"] = [len(plan) for plan in plans]
    parts = {
        "entries": json.dumps(index, separators=(",", ":"), sort_keys=True).encode(),
        "numbers": file.numbers.astype("<f4").tobytes(),
        "cubins": b"".join(file.cubins[blob] for blob in order),
    }
    if plans:
        parts[_SEGMENTS] = b"".join(plans)
    packed = {name: lzma.compress(part, preset=_PRESET) for name, part in parts.items()}
    data, table, at = b"".join(packed.values()), {}, 0
    for name, part in packed.items():
        table[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [at, at + len(part)]}
        at += len(part)
    metadata = {
        "format": _FORMAT,
        "kind": _KIND,
        "pack_version": str(file.pack.version),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    header = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def read_pack(path: Path) -> PackFile:
    """Read and check a pack.

    Raises UsageError when there is no such file, EngineCorruptError when it is no pack or damaged,
    EngineIncompatibleError when another version wrote it.
    """
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"pack {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint="pass the file that `tapeout build --pack FILE` wrote",
        ) from None
    tensors = _tensors(raw, path)
    try:
        unpacked = {name: lzma.decompress(part) for name, part in tensors.items()}
        index = json.loads(unpacked["entries"])
        pack = Pack.from_json(index["pack"])
        cubins = _parts(unpacked["cubins"], index["cubins"])
        blobs = [packed.segment.blob for packed in pack.segments]
        sizes = list(zip(blobs, index.get("plans", []), strict=True))
        plans = _parts(unpacked.get(_SEGMENTS, b""), sizes)
        numbers = np.frombuffer(unpacked["numbers"], "<f4")
    except (lzma.LZMAError, ValueError, KeyError, TypeError, RecursionError, TapeoutError) as error:
        raise EngineCorruptError(f"{path} is damaged: {error}", hint=_AGAIN) from None
    if missing := sorted({kernel.blob for kernel in pack.kernels} - cubins.keys()):
        raise EngineCorruptError(f"{path} is damaged: no cubin {', '.join(missing)}", hint=_AGAIN)
    # Times are kept by what the pack tells of a segment, so it must be what is timed.
    told = {packed.segment.blob: packed.sha256 for packed in pack.segments}
    if other := sorted(b for b, plan in plans.items() if hashlib.sha256(plan).hexdigest() != told[b]):
        raise EngineCorruptError(
            f"{path} is damaged: {', '.join(other)} has another SHA-256 than the pack tells",
            hint=_AGAIN,
        )
    return PackFile(pack, cubins, numbers, plans)


def _parts(joined: bytes, sizes: Iterable[Sequence[Any]]) -> dict[str, bytes]:
    """Blobs by name, of which name and size are told in their order."""
    parts, at = {}, 0
    for blob, size in sizes:
        parts[blob] = joined[at : at + size]
        at += size
    return parts


def _symbol(pack: Pack, blob: str) -> str:
    return next((k.symbol for k in pack.kernels if k.blob == blob), "")


def _tensors(raw: bytes, path: Path) -> dict[str, bytes]:
    """The tensors, after format, version, length and checksum."""
    header, start = _header(raw, path)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT or metadata.get("kind") != _KIND:
        kind = metadata.get("kind") if isinstance(metadata, dict) else None
        raise _no_pack(path, f"its kind is {kind!r}" if kind else "its header holds no metadata of ours")
    known = {str(PACK_VERSION): _TENSORS, str(SEGMENTS_PACK_VERSION): (*_TENSORS, _SEGMENTS)}
    names = known.get(str(metadata.get("pack_version")))
    if names is None:
        raise EngineIncompatibleError(
            f"{path} has pack version {metadata.get('pack_version')}, this tapeout reads "
            f"{' and '.join(known)}",
            hint=_AGAIN,
        )
    try:
        spans = {name: header[name]["data_offsets"] for name in names}
        sizes = [int(begin) for begin, _ in spans.values()], [int(end) for _, end in spans.values()]
    except (KeyError, TypeError, ValueError):
        raise EngineCorruptError(f"{path}: the header is damaged", hint=_AGAIN) from None
    expected, data = max(sizes[1]), raw[start:]
    if len(data) != expected or sizes[0] != [0, *sizes[1][:-1]]:
        state = "truncated" if len(data) < expected else "longer than its header says"
        raise EngineCorruptError(
            f"{path} is {state}: {len(raw)} bytes, expected {start + expected}", hint=_AGAIN
        )
    if hashlib.sha256(data).hexdigest() != metadata.get("sha256"):
        raise EngineCorruptError(f"{path} is damaged: its bytes differ from their checksum", hint=_AGAIN)
    return {name: data[begin:end] for name, begin, end in zip(names, *sizes, strict=True)}


def _header(raw: bytes, path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON, and where the data starts."""
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 0 < length <= _MAX_HEADER_BYTES or raw[8:9] != b"{":
        raise _no_pack(path, "it is not a safetensors file" if raw else "it is empty")
    if len(raw) < 8 + length:
        raise EngineCorruptError(
            f"{path} is truncated: {len(raw)} bytes, its header alone has {length}", hint=_AGAIN
        )
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError):
        raise _no_pack(path, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _no_pack(path, "its header is no object")
    return header, 8 + length


def _no_pack(path: Path, why: str) -> EngineCorruptError:
    return EngineCorruptError(
        f"{path} is not a pack of tactics: {why}", hint="pass the file that `tapeout build --pack FILE` wrote"
    )
