"""The safetensors reader against the reference library, and every kind of damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tapeout.model_defs.hf_checkpoint import INDEX, SINGLE, open_checkpoint
from tapeout.plugins.errors import UnsupportedError, UsageError

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
}


def write_raw(path: Path, header: dict | bytes, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", TORCH)
def test_values_equal_the_reference_library(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 3).to(TORCH[dtype])
        for name, shape in {"a": (5, 7), "b": (0, 3), "c": (), "d": (1000,)}.items()
    }
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = checkpoint.read(name)
        info = checkpoint.tensors[name]
        assert (info.dtype, info.shape) == (dtype, tuple(tensor.shape))
        assert (got.dtype.name, got.shape) == (dtype, info.shape)
        want = tensor.float().numpy() if dtype == "bfloat16" else tensor.numpy()
        assert np.array_equal(got.astype(np.float32) if dtype == "bfloat16" else got, want)
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"


def shard(folder: Path, parts: int) -> None:
    """Split model.safetensors into shards with an index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        mine = {name: tensors[name] for name in names[part::parts]}
        weight_map |= dict.fromkeys(mine, file)
        save_file(mine, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_hold_the_same_tensors_and_digest(llama):
    single = open_checkpoint(llama)
    values = {name: single.read(name) for name in single.tensors}
    digest = single.digest()
    shard(llama, 3)
    sharded = open_checkpoint(llama)
    assert sharded.tensors == single.tensors
    assert all(np.array_equal(sharded.read(name), value) for name, value in values.items())
    assert sharded.digest() == digest


def test_all_missing_shards_and_tensors_in_one_error(llama):
    shard(llama, 4)
    (llama / "model-00001-of-00004.safetensors").unlink()
    cut = llama / "model-00003-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    with pytest.raises(UsageError) as error:
        open_checkpoint(llama)
    assert "model-00001-of-00004.safetensors: missing (6 tensors" in error.value.message
    assert "model-00003-of-00004.safetensors: truncated" in error.value.message
    assert error.value.exit_code == 2


def test_tensor_in_index_but_in_no_shard(llama):
    shard(llama, 2)
    index = json.loads((llama / INDEX).read_text())
    file = "model-00002-of-00002.safetensors"
    index["weight_map"] |= {"ghost.one": file, "ghost.two": file}
    (llama / INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError) as error:
        open_checkpoint(llama)
    assert f"{file}: tensor 'ghost.one'" in error.value.message
    assert "ghost.two" in error.value.message


def test_index_may_not_leave_the_folder(llama):
    (llama / SINGLE).rename(llama.parent / "outside.safetensors")
    (llama / INDEX).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(UsageError, match="not a file name in the same folder"):
        open_checkpoint(llama)


DAMAGED = {
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "'b' overlaps tensor 'a' by 4 bytes"),
    "gap": ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "4 unused bytes between tensor 'a'"),
    "short": ({"a": entry(0, 8, [2]), "b": entry(8, 16, [2])}, 12, "truncated: tensor 'b'"),
    "long": ({"a": entry(0, 8, [2])}, 12, "4 bytes after the last tensor"),
    "dtype": ({"a": entry(0, 8, [2], "F31")}, 8, "unknown dtype 'F31'"),
    "span": ({"a": entry(0, 8, [3])}, 8, "needs 12 bytes, data_offsets [0, 8] span 8"),
    "negative": ({"a": entry(-8, 0, [2])}, 0, "data_offsets [-8, 0]"),
    "shape": ({"a": entry(0, 8, [-2])}, 8, "shape [-2]"),
    "entry": ({"a": 3}, 0, "expected dtype, shape and data_offsets, got 3"),
    "list": (b"[1]", 0, "expected an object"),
    "json": (b"{nope", 0, "not valid JSON"),
    "utf8": (b"\xff\xfe{}", 0, "not valid JSON"),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
        4,
        "'a' appears twice",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_headers(tmp_path, case):
    header, data, message = DAMAGED[case]
    write_raw(tmp_path / SINGLE, header, bytes(data))
    with pytest.raises(UsageError) as error:
        open_checkpoint(tmp_path)
    assert message in error.value.message
    assert SINGLE in error.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x01\x00", "truncated: 2 bytes"),
        (struct.pack("<Q", 500) + b"{}", "truncated: the header needs 508 bytes, the file has 10"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, content, message):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_checkpoint(tmp_path)


@given(st.data())
def test_a_changed_header_byte_never_escapes_as_another_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / SINGLE
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(5)}, path)
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    at = data.draw(st.integers(0, 7 + length))
    raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(path.parent)
    except UsageError:
        return
    for name in checkpoint.tensors:  # whatever is accepted is readable
        checkpoint.read(name)


def test_a_file_that_shrinks_after_opening_is_an_error(llama):
    checkpoint = open_checkpoint(llama)
    (llama / SINGLE).write_bytes((llama / SINGLE).read_bytes()[:3000])
    last = max(checkpoint.files.values(), key=lambda tensor: tensor.start).info.name
    with pytest.raises(UsageError, match=f"{last}' cannot be read"):
        checkpoint.read(last)
    with pytest.raises(UsageError, match="cannot be read"):
        checkpoint.digest()


def test_pickle_weights_are_refused_with_a_way_out(llama):
    (llama / SINGLE).rename(llama / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin") as error:
        open_checkpoint(llama)
    assert "save_pretrained" in error.value.hint


def test_no_weights_says_what_is_there(llama):
    (llama / SINGLE).rename(llama / "consolidated.safetensors")
    with pytest.raises(UsageError, match=r"found consolidated\.safetensors"):
        open_checkpoint(llama)
