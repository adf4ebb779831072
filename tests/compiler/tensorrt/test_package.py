"""Names, versions and loading of the packages, on modules that are made up."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.tensorrt.package import FULL, KINDS, RTX, installed_version, load

NAMES = ("tensorrt", "tensorrt_bindings", "tensorrt_rtx", "tensorrt_rtx_bindings")


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: a module that is None cannot be imported."""
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)


def put(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> ModuleType:
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", [FULL, RTX])
def test_without_a_package(name: str) -> None:
    assert installed_version(name) is None
    with pytest.raises(EngineIncompatibleError, match=f"{KINDS[name].title} is not installed") as told:
        load(name)
    assert "pip install" in str(told.value.hint)


@pytest.mark.parametrize("module_name", ["tensorrt_rtx", "tensorrt_rtx_bindings"])
def test_bindings_alone_will_do(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who imports the package by its main name gets them."""
    if module_name != "tensorrt_rtx":
        monkeypatch.delitem(sys.modules, "tensorrt_rtx")
        monkeypatch.setattr(sys, "path", [])
    module = put(monkeypatch, module_name, "1.7.1.116")
    package = load(RTX)
    assert package.module is module
    assert package.title == "TensorRT-RTX 1.7.1.116"
    assert sys.modules["tensorrt_rtx"] is module


def test_the_version_is_the_distribution_s_or_the_module_s(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "tensorrt", "10.13.3.9")

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    assert installed_version(FULL) == "10.13.3.9"
    known = {"tensorrt-cu12-bindings": "11.0.0.114"}
    monkeypatch.setattr(metadata, "version", lambda name: known[name] if name in known else none(name))
    assert installed_version(FULL) == "11.0.0.114"


def test_libraries_that_do_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text(
        "raise ImportError('libnvinfer.so.10: cannot open shared object file')\n"
    )
    monkeypatch.delitem(sys.modules, "tensorrt")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        EngineIncompatibleError, match=r"is installed and does not load: libnvinfer.so.10"
    ) as told:
        load(FULL)
    assert "install it again" in str(told.value.hint)


def test_a_folder_of_that_name_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python would import it as a namespace."""
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.delitem(sys.modules, "tensorrt")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed_version(FULL) is None


def test_asking_for_a_version_imports_nothing() -> None:
    code = (
        "import sys; from tapeout.runtime.tensorrt.package import installed_version, RTX; "
        f"installed_version(RTX); print(*sorted(set({NAMES!r}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
