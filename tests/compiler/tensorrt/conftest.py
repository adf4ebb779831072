"""Fixtures of the TensorRT tests: lowered modules, and whether the packages are here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from region_reference import Lowered

from tapeout.compiler import front_end
from tapeout.compiler.front_end import Stages, lower_model
from tapeout.compiler.ir import Module, parse
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.progress import SilentProgress
from tapeout.runtime.tensorrt.package import RTX, installed_version


@pytest.fixture(scope="session")
def lowered(
    models: ModuleType, traces: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Lowered:
    """`lowered(model_type, dtype)`: the module of a tiny model for cuda:sm_89.

    float16 is the bfloat16 module with its dtype replaced: engines are not built in it yet, segments are.
    """
    made: dict[tuple[str, str], Module] = {}

    def lower(model_type: str, dtype: str) -> Module:
        traced = "bfloat16" if dtype == "float16" else dtype
        if (model_type, traced) not in made:
            path = models.make_tiny(model_type, tmp_path_factory.mktemp(model_type) / "model")
            options = BuildOptions(target="cuda:sm_89", dtype=traced)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(front_end, "trace_source", traces)
                front = lower_model(str(path), options, Stages(SilentProgress()), lambda source: None)
            made[model_type, traced] = front.module
        module = made[model_type, traced]
        return parse(module.text().replace("bfloat16", "float16")) if dtype == "float16" else module

    return lower


@pytest.fixture(scope="session")
def onnxruntime() -> ModuleType:
    """ONNX Runtime, or a skip."""
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[dev]'")


@pytest.fixture(scope="session")
def rtx() -> str:
    """The version of TensorRT-RTX, or a skip."""
    version = installed_version(RTX)
    if version is None or importlib.util.find_spec("polygraphy") is None:
        pytest.skip("TensorRT-RTX is not installed: pip install '.[tensorrt-rtx]'")
    return version
