"""`peak_memory_bytes`: of this process, whoever started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tapeout.compiler import peak_memory
from tapeout.compiler.peak_memory import peak_memory_bytes

BIG_BYTES = 300 << 20
CHILD = "from tapeout.compiler.peak_memory import peak_memory_bytes; print(peak_memory_bytes())"
PARENT = f"""
import subprocess, sys
from tapeout.compiler.peak_memory import peak_memory_bytes
big = bytearray(b"x") * {BIG_BYTES}
child = subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True)
print(peak_memory_bytes(), child.stdout)
"""
# In a process that is small: this one's peak may be gigabytes, and more would have to be filled.
FREED = """
from tapeout.compiler.peak_memory import peak_memory_bytes
before = peak_memory_bytes()
bytearray(b"x") * (before + (8 << 20))
print(before, peak_memory_bytes())
"""


def test_a_child_of_a_big_process_tells_its_own_peak() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True)
    parent, child = map(int, done.stdout.split())
    assert parent > BIG_BYTES
    assert 1 << 20 < child < BIG_BYTES / 3


def test_what_was_freed_counts() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after >= before + (8 << 20)


def test_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "none")
    assert peak_memory_bytes() > 10 << 20
