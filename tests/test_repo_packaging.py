"""The package: what a wheel holds, what it needs, where its version stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

FOLDERS = ("cli", "compiler", "model_defs", "plugins", "runtime")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build")


def pyproject(repo: Path) -> dict[str, Any]:
    return tomllib.loads((repo / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing stale of the checkout's build folder gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repo / name, source)
    for folder in FOLDERS:
        shutil.copytree(repo / folder, source / folder, ignore=IGNORED)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*command, str(out), str(source)], check=True)
    (path,) = out.glob("*.whl")
    return path


def test_a_wheel_holds_every_file_of_the_folders(repo: Path, wheel: Path) -> None:
    expected = {
        f"tapeout/{path.relative_to(repo).as_posix()}"
        for folder in FOLDERS
        for path in (repo / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_every_folder_with_python_files_is_a_package(repo: Path) -> None:
    missing = {
        str(path.parent.relative_to(repo))
        for folder in FOLDERS
        for path in (repo / folder).rglob("*.py")
        if not (path.parent / "__init__.py").is_file()
    }
    assert not missing


def test_an_installed_wheel_imports_whole(wheel: Path, tmp_path: Path) -> None:
    """Every module of an installation outside the checkout, not of the editable one."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    code = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1])
for path in sorted((site / "tapeout").rglob("*.py")):
    parts = path.relative_to(site).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to(site), module.__file__
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
    )
    assert done.returncode == 0, done.stderr
    assert (target / "bin" / "tapeout").is_file()


def test_version_stands_in_one_place(repo: Path) -> None:
    version = re.escape(pyproject(repo)["project"]["version"])
    for folder in FOLDERS:
        for path in (repo / folder).rglob("*.py"):
            assert not re.search(rf"""["']{version}["']""", path.read_text()), f"{path} repeats the version"


def test_torch_is_pinned_alike_everywhere(repo: Path) -> None:
    extras = pyproject(repo)["project"]["optional-dependencies"]
    texts = [*extras["cpu"], *extras["build"], (repo / "Makefile").read_text()]
    pins = {pin for text in texts for pin in re.findall(r"torch==[\d.]+", text)}
    assert len(pins) == 1, pins


# Needed, but imported later or by name only: each with its reason.
UNUSED_ON_PURPOSE = {
    "tensorrt": "imported by name: an engine without segments needs none (runtime/tensorrt/package.py)",
    "tensorrt-rtx-cu13-libs": "loaded by its bindings",
    "types-pyyaml": "read by mypy",
    "pytest-xdist": "a pytest plugin",
    "import-linter": "a command",
    "ruff": "a command",
    "mypy": "a command",
    "setuptools": "imported by setup.py",
    "safetensors": "read by transformers",
}
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "cuda-bindings": "cuda.bindings",
    "onnx-graphsurgeon": "onnx_graphsurgeon",
    "tensorrt-rtx-cu13-bindings": "tensorrt_rtx_bindings",
    "check-jsonschema": "check_jsonschema",
}


def test_every_dependency_is_used(repo: Path) -> None:
    project = pyproject(repo)["project"]
    wanted = project["dependencies"] + [x for xs in project["optional-dependencies"].values() for x in xs]
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0].lower() for text in wanted}
    sources = "\n".join(p.read_text() for f in (*FOLDERS, "tests") for p in (repo / f).rglob("*.py"))
    unused = {
        name
        for name in names - UNUSED_ON_PURPOSE.keys()
        for module in [IMPORT_NAMES.get(name, name)]
        if not re.search(rf"^\s*(import|from) {module}\b|-m\W+{module}", sources, re.M)
        and f'"{name}"' not in sources
    }
    assert not unused
