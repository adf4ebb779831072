"""Processes that compile kernels: kept for many calls, never twice at one kernel, and when one is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import CapacityError
from tapeout.plugins.triton_aot import CompiledKernel, KernelResources, compile_all, compile_kernel, compilers
from tapeout.plugins.triton_aot import compile as compile_module


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def specs() -> list[KernelSpec]:
    """A small kernel, and the same again."""
    from tapeout.plugins.sample.cuda import receive_launch

    kernel = receive_launch(64, 4, 64, 16).kernel
    return [kernel, kernel]


def pools(monkeypatch: pytest.MonkeyPatch) -> list[ProcessPoolExecutor]:
    """The pools that are made from now on."""
    made: list[ProcessPoolExecutor] = []
    real = compile_module._pool

    def counted(workers: int) -> ProcessPoolExecutor:
        made.append(real(workers))
        return made[-1]

    monkeypatch.setattr(compile_module, "_pool", counted)
    return made


def test_processes_are_kept(specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = pools(monkeypatch)
    with compilers(1):
        kept = [compile_all(specs, sm) for sm in (80, 90)]
    assert len(made) == 1
    assert [[k.cubin for k in row] for row in kept] == [
        [k.cubin for k in compile_all(specs, sm)] for sm in (80, 90)
    ]
    assert not list(tmp_path.rglob(".*")), "no lock stays"


def test_a_process_that_is_killed(specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    made = pools(monkeypatch)
    with compilers(1):
        made[0].submit(os.getpid).result()
        for process in list(made[0]._processes.values()):
            os.kill(process.pid or 0, signal.SIGKILL)
        with pytest.raises(CapacityError, match="was killed, most likely for want of memory"):
            compile_all(specs, 80)
    assert len(compile_all(specs, 80)) == 2, "afterwards it compiles as before"


def test_two_do_not_compile_the_same(specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def slowly(spec: KernelSpec, function: Any, sm: int) -> CompiledKernel:
        done.append(sm)
        time.sleep(0.3)
        return CompiledKernel(b"x", "f", 32, 0, 0, 128, KernelResources(1, 0), ())

    monkeypatch.setattr(compile_module, "_compile", slowly)
    threads = [threading.Thread(target=compile_kernel, args=(specs[0], sm)) for sm in (80, 80, 80, 90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [80, 90]
