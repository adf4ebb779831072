"""Import names and what importing costs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("cli", "compiler", "model_defs", "plugins", "runtime")
FRAMEWORKS = ("torch", "transformers", "onnx", "tensorrt", "tensorrt_rtx", "gguf", "rich", "yaml")
HEAVY = (*FRAMEWORKS, "tapeout.compiler", "tapeout.model_defs")


def test_nothing_imports_the_folders_by_their_bare_names(repo: Path) -> None:
    offenders = []
    for folder in (*FOLDERS, "tests", "benchmarks", "docs"):
        for path in (repo / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                bad = [name for name in names if name.split(".")[0] in FOLDERS]
                offenders += [f"{path.relative_to(repo)}:{node.lineno}: {name}" for name in bad]
    assert not offenders


@pytest.mark.parametrize(
    "module",
    [
        "tapeout.runtime",
        "tapeout.runtime.engine",
        "tapeout.runtime.bench.records",
        "tapeout.runtime.engine_set",
        "tapeout.runtime.resolve_engine",
        "tapeout.runtime.store.pull",
        "tapeout.plugins.cpu",
        "tapeout.plugins.errors",
    ],
)
def test_the_runtime_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.fixture(scope="module")
def copied_folders(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders under their import names, free to be spoiled."""
    top = tmp_path_factory.mktemp("contracts")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo / folder, top / "tapeout" / folder, ignore=ignored)
    shutil.copy(repo / "pyproject.toml", top)
    return top


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("plugins/errors.py", "import tapeout.runtime", "Layers"),
        ("runtime/output.py", "import tapeout.model_defs", "Layers"),
        ("compiler/tactics/outcome.py", "import tapeout.compiler.tensorrt.choice", "Folders of the compiler"),
        ("compiler/local_gpu.py", "import tapeout.compiler.tensorrt.choice", "Folders of the compiler"),
        ("runtime/output.py", "def f():\n    import transformers", "The runtime needs no compiler stack"),
        ("plugins/errors.py", "import onnx", "The runtime needs no compiler stack"),
        ("cli/format.py", "import numpy", "Commands are thin"),
    ],
)
def test_contracts_can_be_broken(copied_folders: Path, file: str, line: str, contract: str) -> None:
    path = copied_folders / "tapeout" / file
    clean = path.read_text()
    path.write_text(f"{clean}\n{line}\n")
    try:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
            cwd=copied_folders,
            env={**os.environ, "PYTHONPATH": str(copied_folders)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(clean)
    assert done.returncode == 1, done.stdout
    broken = [text for text in done.stdout.splitlines() if text.endswith("BROKEN")]
    assert any(text.startswith(contract) for text in broken), broken
