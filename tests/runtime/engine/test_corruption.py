"""Damaged, truncated and foreign files: always one clear engine error, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import tapeout.runtime.engine.container as container
from tapeout.plugins.errors import EngineCorruptError, EngineError, EngineIncompatibleError
from tapeout.runtime.engine import open_engine
from tapeout.runtime.engine.mapped_file import MappedFile

REUSE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300
)
DAMAGE = (EngineCorruptError, EngineIncompatibleError)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@REUSE
@given(st.data())
def test_any_flipped_bit_is_found(engine_path: Path, data: st.DataObject) -> None:
    good = engine_path.read_bytes()
    damaged = bytearray(good)
    damaged[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    copy = engine_path.with_name("damaged")
    copy.write_bytes(damaged)
    with pytest.raises(DAMAGE):
        open_engine(copy)


@REUSE
@given(st.data())
@example(None)
def test_any_replaced_byte_outside_the_header_text_is_found(
    engine_path: Path, data: st.DataObject | None
) -> None:
    """Length, padding, weights, kernels, texts and the checksums themselves."""
    good = engine_path.read_bytes()
    text_end = good.rindex(b"}", 0, header_bytes(engine_path)) + 1
    places = [*range(8), *range(text_end, len(good))]
    chosen = [(p, good[p] ^ 0xFF) for p in places[::37]] if data is None else []
    if data is not None:
        chosen = [(data.draw(st.sampled_from(places)), data.draw(st.integers(0, 255)))]
    for place, value in chosen:
        damaged = bytearray(good)
        damaged[place] = value
        copy = engine_path.with_name("damaged")
        copy.write_bytes(damaged)
        if damaged == good:
            continue
        with pytest.raises(EngineCorruptError):
            open_engine(copy)


def test_truncation_at_every_border(engine_path: Path) -> None:
    good = engine_path.read_bytes()
    file = MappedFile(engine_path, "engine")
    borders = {e.begin for e in file.layout.entries.values()} | {e.end for e in file.layout.entries.values()}
    file.close()
    borders |= {0, 1, 7, 8, 9, 40, header_bytes(engine_path) - 1, header_bytes(engine_path), len(good) - 1}
    for size in sorted(borders - {len(good)}):
        engine_path.write_bytes(good[:size])
        with pytest.raises(EngineCorruptError):
            open_engine(engine_path)
    engine_path.write_bytes(good[:-1])
    with pytest.raises(EngineCorruptError, match=rf"truncated: {len(good) - 1} bytes, expected {len(good)}"):
        open_engine(engine_path)
    engine_path.write_bytes(good + b"\0")
    with pytest.raises(EngineCorruptError, match="longer than its header says"):
        open_engine(engine_path)


def test_the_damaged_part_is_named(engine_path: Path) -> None:
    good = engine_path.read_bytes()
    file = MappedFile(engine_path, "engine")
    entries = dict(file.layout.entries)
    file.close()
    for name in ("weights/wide", "text/tokenizer.json", "kernels/native.so"):
        damaged = bytearray(good)
        damaged[entries[name].begin] ^= 1
        engine_path.write_bytes(damaged)
        with pytest.raises(EngineCorruptError, match=name) as error:
            open_engine(engine_path)
        assert str(engine_path) in error.value.message
        open_engine(engine_path, verify=False).close()
        with open_engine(engine_path, verify=False) as engine, pytest.raises(EngineCorruptError, match=name):
            engine.verify_all()


def test_other_format_version_is_named_before_damage(engine_path: Path) -> None:
    data = engine_path.read_bytes().replace(b'"format_version":"1"', b'"format_version":"7"', 1)
    engine_path.write_bytes(data[:-5])  # damaged as well: the version explains more
    with pytest.raises(EngineIncompatibleError, match="format 7, this tapeout reads format 1") as error:
        open_engine(engine_path)
    assert "tapeout build MODEL" in (error.value.hint or "")


@REUSE
@given(st.binary(max_size=200))
@example(b"{}")
@example(b"\x02\0\0\0\0\0\0\0{}")
@example(b"\x02\0\0\0\0\0\0\0[]")
@example((8000).to_bytes(8, "little") + b"[" * 8000)
def test_random_files_are_no_engines(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(EngineCorruptError, match="is not a tapeout engine"):
        open_engine(tmp_path / "file")


def test_plain_safetensors_are_no_engines(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        save_file({"a": np.zeros(3)}, tmp_path / "model.safetensors", metadata)
        with pytest.raises(EngineCorruptError, match="is not a tapeout engine"):
            open_engine(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 5]},
        {"shape": [-3, -4]},
        {"shape": "ab"},
        {"dtype": "X"},
        {"dtype": ["F32"]},
        {"data_offsets": [0, 49]},
        {"data_offsets": [0]},
        {"extra": 1},
    ],
)
def test_impossible_headers(engine_path: Path, change: dict[str, Any]) -> None:
    data = engine_path.read_bytes()
    table = json.loads(data[8 : header_bytes(engine_path)])
    table["weights/w"] |= change
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    engine_path.write_bytes(len(text).to_bytes(8, "little") + text + data[header_bytes(engine_path) :])
    with pytest.raises(EngineCorruptError, match="damaged"):
        open_engine(engine_path)


class TestShared:
    """Weights in a file beside the engine."""

    @pytest.fixture
    def pair(self, tmp_path: Path, write_tiny: Any) -> tuple[Path, Path]:
        result = write_tiny(tmp_path / "a.engine", shared=True)
        assert len(result.paths) == 2
        return result.paths

    def test_both_files_open_as_one_engine(
        self, pair: tuple[Path, Path], arrays: dict[str, np.ndarray]
    ) -> None:
        with open_engine(pair[0]) as engine:
            assert bytes(engine.weight("w").data) == arrays["w"].tobytes()
            assert engine.files == pair
            assert engine.manifest.weights["file"] == pair[1].name
            assert engine.sizes()["total"] == sum(p.stat().st_size for p in pair)
            assert engine.sizes()["weights"] == 0
            engine.verify_all()

    def test_a_missing_weight_file_is_named(self, pair: tuple[Path, Path]) -> None:
        pair[1].unlink()
        with pytest.raises(EngineError, match=rf"{pair[1].name}, which does not stand beside it"):
            open_engine(pair[0])

    def test_weights_of_another_build_are_refused(
        self, pair: tuple[Path, Path], arrays: dict[str, np.ndarray], write_tiny: Any
    ) -> None:
        arrays["w"] += 1
        other = write_tiny(pair[0].with_name("b.engine"), shared=True, source_digest="other")
        pair[1].write_bytes(other.paths[1].read_bytes())
        with pytest.raises(EngineIncompatibleError, match="does not hold the weights"):
            open_engine(pair[0])

    @REUSE
    @given(data=st.data())
    def test_any_flipped_bit_is_found(self, pair: tuple[Path, Path], data: st.DataObject) -> None:
        good = pair[1].read_bytes()
        damaged = bytearray(good)
        damaged[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        pair[1].write_bytes(damaged)
        try:
            with pytest.raises(EngineError):
                open_engine(pair[0])
        finally:
            pair[1].write_bytes(good)

    def test_a_weight_file_is_no_engine(self, pair: tuple[Path, Path]) -> None:
        with pytest.raises(EngineCorruptError, match="not a tapeout engine: it holds 'weights'"):
            open_engine(pair[1])


def test_damage_in_any_chunk_is_found(tmp_path: Path, write_tiny: Any, arrays: dict[str, np.ndarray]) -> None:
    arrays["large"] = np.arange((9 << 20) // 4, dtype=np.int32)
    write_tiny(tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        info = engine.weights["large"]
    for offset in (0, container.CHUNK_BYTES, info.size_bytes - 1):
        with (tmp_path / "e").open("r+b") as file:
            file.seek(info.begin + offset)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 16]))
            file.flush()
            with pytest.raises(EngineCorruptError, match=r"weights/\w+"):
                open_engine(tmp_path / "e")
            file.seek(-1, 1)
            file.write(byte)
    open_engine(tmp_path / "e").close()
