"""What tests of whole matrix runs share: commands of build processes, and what a run has done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tapeout.compiler.matrix.results import MatrixReport
from tapeout.compiler.tactics.gpu_cache import Gpu

PROGRAM = Path(__file__).with_name("worker_without_kernels.py")
FRESH = (sys.executable, str(PROGRAM))
NOTHING_RUNS = (sys.executable, "-c", "raise SystemExit('a build process was started')")
LIMITS = "{max-batch-size: 2, max-num-tokens: 4, max-seq-len: 64, tokens-per-page: 16}"
#: Of the matrix, what can be built.
GOOD = ["a/h200", "a/cpu", "a/sm_80", "b/h200", "b/sm_80"]
H200 = Gpu("NVIDIA H200", 90, 132, 141)


@contextmanager
def one_thread() -> Iterator[None]:
    """Build processes time tactics with one thread each, whatever this process has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def statuses(report: MatrixReport) -> dict[str, str]:
    return {r.title: r.status for r in report.results}


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())
