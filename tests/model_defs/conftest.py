"""Fixtures of the checkpoint tests: a tiny folder to damage, SmolLM2, a GGUF writer."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tapeout.model_defs import ModelSource, open_model


def _load_models() -> ModuleType:
    if "tapeout_test_models" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "tapeout_test_models", Path(__file__).parents[1] / "models.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["tapeout_test_models"] = module
        spec.loader.exec_module(module)
    return sys.modules["tapeout_test_models"]


@pytest.fixture(scope="session")
def models() -> ModuleType:
    return _load_models()


@pytest.fixture
def llama(models: ModuleType, tmp_path: Path) -> Path:
    """A tiny Llama checkpoint that the test may change."""
    return models.make_tiny("llama", tmp_path / "llama")


@pytest.fixture(scope="session")
def smollm2_path(models: ModuleType) -> Path:
    return models.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> ModelSource:
    return open_model(str(smollm2_path))


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """`edit_json(path, key=value)` sets keys of a JSON file, `key=...` (Ellipsis) removes one."""

    def edit(path: Path, **changes: Any) -> None:
        data = json.loads(path.read_text()) if path.exists() else {}
        for key, value in changes.items():
            if value is ...:
                data.pop(key, None)
            else:
                data[key] = value
        path.write_text(json.dumps(data))

    return edit


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Writes a tiny HF folder as GGUF with llama.cpp's conventions, plain float32."""
    return _write_gguf


def _write_gguf(
    folder: Path,
    path: Path,
    *,
    arch: str,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    pre: str = "gpt-2",
) -> Path:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    _add_tokenizer(writer, folder, pre)
    for name, values in _converted(folder, arch, config).items():
        if name not in drop:
            writer.add_tensor(name, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda t: vocab[t])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_add_bos_token(True)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _converted(folder: Path, arch: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """HF tensors under GGUF names with the value changes llama.cpp's converter makes."""
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    converted = {}
    for hf_name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor
        if arch == "llama" and ("q_proj" in hf_name or "k_proj" in hf_name):
            heads = config["num_attention_heads" if "q_proj" in hf_name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if arch in ("gemma2", "gemma3") and hf_name.endswith("norm.weight"):
            values = values + 1
        name = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        converted[name] = np.ascontiguousarray(values)
    return converted
