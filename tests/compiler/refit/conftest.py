"""Two checkpoints of one config, and an engine of each, made once a session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tapeout.compiler.build import build
from tapeout.compiler.refit_check import Ran

# Tests are imported by path (importlib mode), so their shared helpers need a place to be found.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def built(models: ModuleType, options: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, `tuned` (checkpoints of one config), and engines of both, embedded."""
    folder = tmp_path_factory.mktemp("refit")
    for name, seed in (("base", 0), ("tuned", 1)):
        model = models.make_tiny("llama", folder / name, seed=seed)
        build(str(model), folder / f"{name}.engine", options(verify=False))
    return folder


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs a step: where that is not what a test is about."""

    class NoStep(contextlib.nullcontext[Any]):
        def __init__(self, target: str) -> None:
            super().__init__(self)

        def run(self, path: Path, name: Path) -> Ran:
            return Ran(False, "not asked")

    monkeypatch.setattr("tapeout.compiler.refit.FirstStep", NoStep)
