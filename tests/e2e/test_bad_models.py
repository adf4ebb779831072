"""A model that cannot be built: one clear message, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from refusals import refused
from safetensors.numpy import load_file, save_file

Invoke = Callable[..., Result]
Edit = Callable[..., None]


@pytest.mark.parametrize("name", ["missing-folder", "missing.gguf", "a/b/c"])
def test_missing_model(build: Callable[..., Result], tmp_path: Path, name: str) -> None:
    refused(build(tmp_path / name), 2, str(tmp_path / name), "no such file or directory")


def test_folder_without_config(build: Callable[..., Result], checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(build(checkpoint), 2, str(checkpoint), "no config.json", "model.safetensors")


def test_config_that_is_not_json(build: Callable[..., Result], checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "llama",')
    refused(build(checkpoint), 2, str(checkpoint / "config.json"), "not valid JSON")


def test_unknown_architecture(build: Callable[..., Result], checkpoint: Path, edit_json: Edit) -> None:
    edit_json(checkpoint / "config.json", model_type="frobnicator", architectures=["FrobForCausalLM"])
    refused(build(checkpoint), 5, "'frobnicator'", "FrobForCausalLM", "no config class and no model code")


def test_an_encoder_is_not_supported(build: Callable[..., Result], checkpoint: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(build(checkpoint), 5, "t5")


def test_every_tensor_that_does_not_fit_is_named(build: Callable[..., Result], checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.surprise"] = np.zeros(3, np.float32)
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((64, 63), np.float32)
    save_file(tensors, checkpoint / "model.safetensors")
    refused(
        build(checkpoint),
        2,
        "missing: model.layers.0.mlp.up_proj.weight [96, 64]",
        "missing: model.norm.weight [64]",
        "extra: model.layers.7.surprise [3]",
        "wrong shape: model.layers.1.self_attn.q_proj.weight is [64, 63], expected [64, 64]",
    )


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_safetensors(build: Callable[..., Result], checkpoint: Path, kept: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(build(checkpoint), 2, "model.safetensors", "truncated")


@pytest.mark.parametrize("kept", [3, 20, 5_000, 2_000_000, 40_000_000])
def test_truncated_gguf(build: Callable[..., Result], smollm2_gguf: Path, tmp_path: Path, kept: int) -> None:
    """Cut within the magic number, the counts, the metadata, the tokenizer or a tensor."""
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(kept))
    refused(build(path), 2, "cut.gguf", "truncated")


def test_a_file_that_is_no_gguf(build: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK" * 100)
    refused(build(tmp_path / "model.bin"), 2, "model.bin", "not a GGUF file")


def test_weights_that_are_not_finite(
    build: Callable[..., Result], checkpoint: Path, tiny_cache: Path, tiny_engine: Path
) -> None:
    """Only running the engine shows it, so the finished file is thrown away."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, checkpoint / "model.safetensors")
    refused(build(checkpoint, "--timing-cache", tiny_cache), 1, "not finite")


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path("MARKER").touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_code_of_a_model_runs_only_when_allowed(
    tapeout: Callable[..., subprocess.CompletedProcess[str]],
    invoke: Invoke,
    checkpoint: Path,
    edit_json: Edit,
    tmp_path: Path,
    allowed: bool,
) -> None:
    marker = tmp_path / "ran"
    (checkpoint / "own.py").write_text(CODE.replace("MARKER", str(marker)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(
        checkpoint / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=auto_map
    )
    build = ["build", checkpoint, "-o", tmp_path / "m.engine", "--dry-run"]
    if allowed:  # in a process of its own, because the code becomes part of the one that runs it
        result = tapeout(*build, "--trust-remote-code", env={**os.environ, "HF_HOME": str(tmp_path / "hf")})
        assert result.returncode == 0, result.stderr
    else:
        refused(invoke(*build), 2, "'own'", "own Python code", "--trust-remote-code")
    assert marker.exists() == allowed
    assert not (tmp_path / "m.engine").exists()


def test_hub_id_without_network(build: Callable[..., Result]) -> None:
    """HF_HUB_OFFLINE=1 is set for all tests."""
    refused(build("nobody/never-made"), 2, "'nobody/never-made'", "local cache", "HF_HUB_OFFLINE")
