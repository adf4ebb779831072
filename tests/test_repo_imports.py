"""Import names and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("cli", "compiler", "model_defs", "plugins", "runtime")
FRAMEWORKS = ("torch", "transformers", "onnx", "tensorrt", "gguf", "rich", "yaml")
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


@pytest.mark.parametrize("module", ["tapeout.runtime", "tapeout.runtime.engine", "tapeout.plugins.cpu"])
def test_the_runtime_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
