"""A tiny CUDA engine, real but for its kernels, on a driver made of host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_cuda import FakeCuda
from next_token import NextToken

from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.runtime.engine import Engine, open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda import CudaExecutor, driver, replay

PAGES = 8


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def engine_path(
    request: pytest.FixtureRequest, models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The engine, made once a session: tests of this folder stay on one worker."""
    folder = tmp_path_factory.mktemp("cuda")
    options = BuildOptions(
        target="cuda:sm_90", dtype=request.param, max_batch_size=4, max_num_tokens=16, max_seq_len=64,
        tokens_per_page=16,
    )  # fmt: skip
    build(str(models.make_tiny("llama", folder / "model")), folder / "model.engine", options)
    return folder / "model.engine"


@pytest.fixture
def engine(engine_path: Path) -> Iterator[Engine]:
    with open_engine(engine_path) as engine:
        yield engine


Install = Callable[[FakeCuda], FakeCuda]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(fake)` makes a driver the process's own."""

    def put(fake: FakeCuda) -> FakeCuda:
        for module in (driver, replay):
            monkeypatch.setattr(module, "cu", fake)
        driver.open_device.cache_clear()
        return fake

    yield put
    driver.open_device.cache_clear()


@pytest.fixture
def cuda(install: Install) -> FakeCuda:
    return install(FakeCuda())


@pytest.fixture
def executor(engine: Engine, cuda: FakeCuda) -> Iterator[CudaExecutor]:
    executor = load_executor(engine, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    cuda.on_launch = NextToken(executor, engine)
    yield executor
    executor.close()
    assert not any(cuda.open.values()), cuda.open
    assert cuda.contextless_calls == []
