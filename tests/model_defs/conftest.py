"""Fixtures of the checkpoint tests: a tiny folder to damage, SmolLM2, a GGUF writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tapeout.model_defs import ModelSource, open_model


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
def write_gguf(gguf_writer: ModuleType) -> Callable[..., Path]:
    """tests/gguf_writer.py."""
    write: Callable[..., Path] = gguf_writer.write_gguf
    return write
