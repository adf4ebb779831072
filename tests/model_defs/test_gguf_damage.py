"""GGUF files that are damaged, incomplete or of a kind that cannot be built: refused, each by name."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest

from tapeout.model_defs import open_model
from tapeout.model_defs.gguf_families import REFUSED
from tapeout.plugins.errors import UnsupportedError, UsageError


def test_missing_and_unknown_tensors_are_all_named(llama, write_gguf, tmp_path):
    path = write_gguf(
        llama,
        tmp_path / "m.gguf",
        arch="llama",
        drop=("blk.1.attn_q.weight", "blk.0.ffn_up.weight"),
        extra={"blk.0.mystery.weight": np.zeros(4, np.float32)},
    )
    with pytest.raises(UsageError) as error:
        open_model(str(path))
    for name in ("blk.1.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.mystery.weight"):
        assert name in error.value.message


def test_unknown_architecture(llama, write_gguf, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf", arch="llama")
    # the same length, so that the file stays consistent
    path.write_bytes(path.read_bytes().replace(b"llama", b"lluma"))
    with pytest.raises(UnsupportedError, match=r"'lluma'.*qwen3"):
        open_model(str(path))


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_an_architecture_that_cannot_be_built_is_refused_with_the_reason(tmp_path, arch):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    with pytest.raises(UnsupportedError, match=rf"architecture '{arch}', which cannot be built: "):
        open_model(str(tmp_path / "m.gguf"))


def test_a_tensor_type_that_cannot_be_dequantized_is_refused_before_anything_else(
    llama, write_gguf, tmp_path
):
    path = write_gguf(
        llama, tmp_path / "m.gguf", arch="llama", extra={"blk.0.odd.weight": np.zeros(32, np.int8)}
    )
    with pytest.raises(UnsupportedError, match=r"'blk\.0\.odd\.weight' has type I8.*cannot dequantize"):
        open_model(str(path))


def test_a_key_that_nothing_reads_is_refused(llama, write_gguf, tmp_path):
    metadata = {"llama.attention.scale": 0.5, "llama.logit_scale": 2.0}
    path = write_gguf(llama, tmp_path / "m.gguf", arch="llama", metadata=metadata)
    with pytest.raises(UnsupportedError) as error:
        open_model(str(path))
    assert "llama.attention.scale = 0.5" in error.value.message
    assert "llama.logit_scale = 2.0" in error.value.message


def test_a_value_that_only_one_model_can_have(models, write_gguf, tmp_path):
    folder = models.make_tiny("stablelm", tmp_path / "hf")
    metadata = {"stablelm.use_parallel_residual": True}
    path = write_gguf(folder, tmp_path / "m.gguf", arch="stablelm", metadata=metadata)
    with pytest.raises(UnsupportedError, match="use_parallel_residual is True, only False"):
        open_model(str(path))


def test_unknown_pre_tokenizer(llama, write_gguf, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf", arch="llama", pre="never-heard-of")
    with pytest.raises(UnsupportedError, match="never-heard-of"):
        open_model(str(path))


def test_bad_magic(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(UsageError, match="not a GGUF file"):
        open_model(str(path))


def test_other_version(llama, write_gguf, tmp_path):
    path = write_gguf(llama, tmp_path / "m.gguf", arch="llama")
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match="version 1"):
        open_model(str(path))


def test_truncation_anywhere_is_a_usage_error(llama, write_gguf, tmp_path):
    whole = write_gguf(llama, tmp_path / "whole.gguf", arch="llama").read_bytes()
    path = tmp_path / "cut.gguf"
    for part in (0, 3, 23, 100, len(whole) // 100, len(whole) // 20, len(whole) // 2, len(whole) - 5000):
        path.write_bytes(whole[:part])
        with pytest.raises(UsageError, match=r"truncated|damaged") as error:
            open_model(str(path))
        assert error.value.hint


def test_random_bytes_in_the_header_never_escape_as_other_errors(llama, write_gguf, tmp_path):
    whole = write_gguf(llama, tmp_path / "whole.gguf", arch="llama").read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "bad.gguf"
    for _ in range(40):
        data = bytearray(whole)
        for at in random.integers(4, 3000, 3):
            data[at] = random.integers(256)
        path.write_bytes(data)
        with contextlib.suppress(UsageError, UnsupportedError):
            open_model(str(path))
