"""Tests that need a GPU: skipped where there is none; what they compare with comes from the bundle.

Nothing here needs torch, Triton or the conftest above, so that `make test-gpu` runs where only the
runtime and pytest are.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gpu_bundle
from gpu_bundle import Bundle

_REPORT = pytest.StashKey[list[str]]()
_HINT = "make it with `make gpu-bundle` where the compiler is, see tests/gpu/README.md"


@functools.cache
def no_gpu() -> str | None:
    """Why no GPU can be used here; None where one can."""
    try:
        from tapeout.runtime.executors.cuda.driver import open_device
    except ImportError as error:
        return f"no GPU is looked for: {error}"
    try:
        open_device(0)
    except Exception as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    if own and (reason := no_gpu()) is not None:
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash[_REPORT]:
        terminalreporter.section("found on the GPU")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line to the summary: figures that no test judges."""
    return request.config.stash[_REPORT].append


@pytest.fixture(scope="session")
def bundle(report: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle, made for this machine's GPU."""
    from tapeout.runtime.executors.cuda.driver import open_device

    found = gpu_bundle.open_bundle(gpu_bundle.folder(), tmp_path_factory.mktemp("engines"))
    if found is None:
        pytest.fail(f"no bundle in {gpu_bundle.folder()}; {_HINT}", pytrace=False)
    gpu = open_device(0).facts
    if gpu.sm != found.sm:
        pytest.fail(
            f"the bundle is for {found.facts['target']}, this GPU is {gpu.name}: "
            f"`make gpu-bundle GPU_TARGET=cuda:sm_{gpu.sm}`",
            pytrace=False,
        )
    report(f"{gpu.name}, driver for CUDA {gpu.driver_version / 1000:g}, bundle for {found.facts['target']}")
    if found.stale:
        report("warning: the bundle was made with other sources than these: its kernels are not today's")
    return found


class Engines:
    """Loaded engines with the steps they ran; loaded once, closed at the end."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._open: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def llm(self, name: str, **options: Any) -> tuple[Any, list[Any]]:
        """(LLM, StepRecords), the latter emptied."""
        from tapeout.runtime import LLM

        key = (name, *sorted(options.items()))
        if key not in self._open:
            steps: list[Any] = []
            self._open[key] = LLM(self._bundle.path(name), on_step=steps.append, **options), steps
        llm, steps = self._open[key]
        steps.clear()
        return llm, steps

    def close(self) -> None:
        for llm, _ in self._open.values():
            llm.close()


@pytest.fixture(scope="session")
def engines(bundle: Bundle) -> Iterator[Engines]:
    made = Engines(bundle)
    yield made
    made.close()


@pytest.fixture(scope="session")
def smollm2_gguf(bundle: Bundle) -> Path:
    """SmolLM2-135M-Instruct; its absence fails, because a skip would hide half of the tests."""
    path = gpu_bundle.find_smollm2(bundle.facts["smollm2_bytes"])
    if path is None or not path.is_file():
        where = gpu_bundle.model_folder()
        pytest.fail(f"SmolLM2 is missing: no model.gguf, nor all of its parts, in {where}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of this Python in a process of its own, with this one's imports."""

    def run(*args: str | Path, before: tuple[str, ...] = (), timeout: float = 60) -> Any:
        paths = os.pathsep.join(path for path in sys.path if path)
        return subprocess.run(
            [*before, sys.executable, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )

    return run


@pytest.fixture(scope="session")
def tapeout(python: Callable[..., Any]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command, installed or not."""

    def run(*args: str | Path, timeout: float = 60) -> Any:
        return python("-c", "from tapeout.cli.main import main; main()", *args, timeout=timeout)

    return run
