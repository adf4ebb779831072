"""A matrix of tiny models and its first run, once a session.

Build processes are the real ones, but that no kernel is compiled (worker_without_kernels.py) and that all but
one are forked from a process with their imports done (fork_server.py).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.matrix.build_matrix import MatrixRequest, build_matrix
from tapeout.compiler.matrix.results import MatrixReport

# Tests are imported by path (importlib mode), so their shared helpers need a place to be found.
sys.path.insert(0, str(Path(__file__).parent))

from matrix_runs import LIMITS, PROGRAM, one_thread


@pytest.fixture(scope="session")
def checkpoints(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` and `b`, of one shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        models.make_tiny("llama", folder / name, seed=seed)
    return folder


@pytest.fixture(scope="session")
def matrix(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five engines that can be built; one of a model that is not there, one of no model that we know."""
    (checkpoints / "odd").mkdir()
    (checkpoints / "odd" / "config.json").write_text('{"model_type": "hexapod"}')
    path = tmp_path_factory.mktemp("matrix") / "engines.yaml"
    path.write_text(
        f"""
        defaults: {LIMITS}
        models: {{a: {checkpoints}/a, b: {checkpoints}/b, gone: {checkpoints}/gone, odd: {checkpoints}/odd}}
        targets: ["cuda:h200", cpu, "cuda:sm_80"]
        exclude: [{{model: b, target: cpu}}, {{model: gone}}, {{model: odd}}]
        include: [{{model: gone, target: cpu}}, {{model: odd, target: cpu}}]
        """
    )
    return path


@pytest.fixture(scope="session")
def worker(preloaded: Callable[[Path], tuple[str, ...]]) -> tuple[str, ...]:
    """The command of a build process."""
    return preloaded(PROGRAM)


@pytest.fixture(scope="session")
def first(matrix: Path, worker: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> MatrixReport:
    """The first run, into a directory that is not there yet."""
    request = MatrixRequest(matrix, tmp_path_factory.mktemp("set") / "engines", workers=1)
    with one_thread():
        return build_matrix(request, worker=worker)


@pytest.fixture
def copied(first: MatrixReport, tmp_path: Path) -> Path:
    """The set of the first run, somewhere else."""
    return Path(shutil.copytree(first.output, tmp_path / "copy"))
