"""What README.md says about Python is true."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest


def test_the_python_example_runs(
    repo: Path,
    alphabet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo / "README.md").read_text(), re.S)
    assert blocks
    shutil.copy(alphabet, tmp_path / "smollm2.engine")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "fghijklmnopqrstuvwxyz stop\nbcdefghijklmnopqrstuvwxyz stop\n"
