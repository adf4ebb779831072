"""The bytes of a pack: what is written is read, and nothing else is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine.launches import Segment
from tapeout.runtime.tactic_timer.pack import Pack, PackedSegment
from tapeout.runtime.tactic_timer.pack_file import encode_pack, read_pack


@pytest.fixture
def path(write_pack: Callable[..., tuple[Path, Pack]]) -> Path:
    return write_pack(("a", "b"), ("c",))[0]


def with_header(path: Path, change: Callable[[dict], object]) -> None:
    """Change the JSON header in place."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_what_is_written_is_read(write_pack: Callable[..., tuple[Path, Pack]]) -> None:
    path, pack = write_pack(("a", "b"), ("c",))
    file = read_pack(path)
    assert file.pack == pack
    assert file.pack.num_candidates == 3
    assert file.numbers.tolist() == [0, 1, 2, 3, 4]
    assert set(file.cubins) == {"code.cubin"}
    assert encode_pack(file) == path.read_bytes()
    assert len(path.read_bytes()) < len(file.cubins["code.cubin"])


def test_anybody_can_open_it(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["cubins", "entries", "numbers"]
        assert file.metadata()["kind"] == "pack"
        assert file.get_tensor("entries").dtype == np.uint8


def test_every_flipped_bit_is_found(path: Path) -> None:
    data, pack = path.read_bytes(), read_pack(path).pack
    start = 8 + int.from_bytes(data[:8], "little")
    for place in range(start, len(data), max(1, (len(data) - start) // 50)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(EngineCorruptError, match=r"damaged: its bytes differ from their checksum"):
            read_pack(path)
    for place in range(0, start, 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert read_pack(path).pack == pack, place  # a bit of what nobody needs
        except TapeoutError:
            continue


def test_every_length_is_checked(path: Path) -> None:
    data = path.read_bytes()
    for size in (1, 7, 8, 50, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(EngineCorruptError, match=r"truncated|not a pack"):
            read_pack(path)
    path.write_bytes(data + b"more")
    with pytest.raises(EngineCorruptError, match=r"longer than its header says"):
        read_pack(path)


def test_a_segment_is_the_one_that_is_told_of(path: Path) -> None:
    """Its times would be kept for other bytes."""
    plan, file = b"a plan", read_pack(path)
    segment = Segment("a.plan", "tensorrt_rtx", "1.7.1", (), (), (), (), ())
    packed = PackedSegment(segment, hashlib.sha256(plan).hexdigest(), "key", "", 0.5)
    file = replace(file, pack=replace(file.pack, segments=(packed,)), plans={"a.plan": plan})
    path.write_bytes(encode_pack(file))
    assert read_pack(path).plans == {"a.plan": plan}
    path.write_bytes(encode_pack(replace(file, plans={"a.plan": b"a plam"})))
    with pytest.raises(EngineCorruptError, match=r"a\.plan has another SHA-256 than the pack tells"):
        read_pack(path)


def test_another_version_is_refused(path: Path) -> None:
    with_header(path, lambda header: header["__metadata__"].update(pack_version="9"))
    with pytest.raises(EngineIncompatibleError, match=r"has pack version 9, this tapeout reads 3") as caught:
        read_pack(path)
    assert "tapeout build MODEL --target TARGET --pack FILE" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"PK\3\4" * 99, "it is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{}", "its header holds no metadata of ours"),
        ((2).to_bytes(8, "little") + b"{x", "its header is no JSON"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "it is not a safetensors file"),
    ],
)
def test_what_is_no_pack_is_refused(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(EngineCorruptError, match=words) as caught:
        read_pack(path)
    assert "tapeout build --pack FILE" in str(caught.value.hint)


def test_an_engine_is_no_pack(path: Path) -> None:
    with_header(path, lambda header: header["__metadata__"].update(kind="engine"))
    with pytest.raises(EngineCorruptError, match=r"not a pack of tactics: its kind is 'engine'"):
        read_pack(path)


def test_a_pack_is_no_engine(path: Path) -> None:
    with pytest.raises(EngineCorruptError, match=r"not a tapeout engine: it is a pack of tactics") as caught:
        open_engine(path)
    assert "tapeout time" in str(caught.value.hint)


def test_a_pack_that_is_not_there(tmp_path: Path) -> None:
    for name in ("none.pack", ".", "x" * 5000):
        with pytest.raises(UsageError, match=r"cannot be read"):
            read_pack(tmp_path / name)
