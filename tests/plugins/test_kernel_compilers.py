"""Processes that compile kernels: kept for many calls, never twice at one kernel, and when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.errors import CapacityError, TapeoutError
from tapeout.plugins.triton_aot import (
    CompiledKernel,
    compile_ahead,
    compile_all,
    compile_kernel,
    compilers,
    processes,
)
from tapeout.plugins.triton_aot import compile as compile_module
from tapeout.plugins.triton_aot.compile import cached_kernel


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
    real = processes._pool

    def counted(workers: int) -> ProcessPoolExecutor:
        made.append(real(workers))
        return made[-1]

    monkeypatch.setattr(processes, "_pool", counted)
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


def test_a_kernel_that_does_not_compile_costs_itself(specs: list[KernelSpec]) -> None:
    good = specs[0]
    bad = replace(good, constants={**good.constants, "ROWS": 33})  # a block's rows are a power of two
    others = [replace(good, constants={**good.constants, "TOKENS": tokens}) for tokens in (128, 256)]
    with compilers(1), pytest.raises(TapeoutError, match="ROWS=33"):
        compile_all([bad, *others], 80)
    assert all(cached_kernel(spec, 80) is not None for spec in others)


def test_what_is_begun_ahead_is_compiled_once(
    specs: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    made = pools(monkeypatch)
    with compilers(1):
        submit = made[0].submit
        monkeypatch.setattr(made[0], "submit", lambda *call: asked.append(call) or submit(*call))
        compile_ahead(specs, 80)
        kernel, again = compile_all(specs, 80)
        compile_ahead(specs, 80)
    assert [(spec, sm) for _, spec, sm in asked] == [(specs[0], 80)]
    assert kernel == again == compile_kernel(specs[0], 80)


@pytest.mark.parametrize("kept", [True, False])
def test_progress_counts_distinct_kernels_as_they_come(specs: list[KernelSpec], kept: bool) -> None:
    """One is in the cache and stands there twice."""
    told: list[tuple[int, int]] = []
    good = specs[0]
    others = [replace(good, constants={**good.constants, "TOKENS": tokens}) for tokens in (128, 256)]
    compile_kernel(good, 80)
    with compilers(1) if kept else nullcontext():
        compile_all([*specs, *others], 80, 1, progress=lambda *counts: told.append(counts))
        assert told == [(1, 3), (2, 3), (3, 3)]
        bad = replace(good, constants={**good.constants, "ROWS": 33})
        with pytest.raises(TapeoutError, match="ROWS=33"):
            compile_all([good, bad], 80, 1, progress=lambda *counts: told.append(counts))
    assert told[3:] == ([(1, 2), (2, 2)] if kept else [(1, 2)])


def test_kernels_that_nobody_waits_for_are_not_begun(specs: list[KernelSpec], tmp_path: Path) -> None:
    """So an interrupted build ends at once."""
    sms = (80, 86, 89, 90, 100, 103, 120)
    with compilers(1):
        for sm in sms:
            compile_ahead(specs, sm)
    assert len(list(tmp_path.rglob("*-sm*"))) < len(sms) - 1


def test_without_processes_nothing_is_begun(specs: list[KernelSpec], tmp_path: Path) -> None:
    compile_ahead(specs, 80)
    assert not list(tmp_path.rglob("*"))


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
        return CompiledKernel(b"x", "f", 32, 0, 0, 128, ())

    monkeypatch.setattr(compile_module, "_compile", slowly)
    threads = [threading.Thread(target=compile_kernel, args=(specs[0], sm)) for sm in (80, 80, 80, 90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [80, 90]


def test_only_the_processes_get_memory_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    made = pools(monkeypatch)
    with compilers(1):
        assert "GLIBC_TUNABLES" not in os.environ
        assert "glibc.malloc.top_pad=" in made[0].submit(os.getenv, "GLIBC_TUNABLES").result()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    with compilers(1):
        assert made[1].submit(os.getenv, "GLIBC_TUNABLES").result() == "glibc.malloc.check=0"


LONG_QUEUE = """
import time
from tapeout.plugins.triton_aot import processes

if __name__ == "__main__":
    processes._get_ready = time.time  # as the first thing, instead of the compiler's imports
    with processes._started(2) as made:
        made.pool.submit(time.time).result()
        asked = [made.pool.submit(time.sleep, 1) for _ in range(300)]
        print("asked", flush=True)
        asked[-1].result()
"""


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_process_and_waits_for_no_queue(times: int, tmp_path: Path) -> None:
    """A terminal sends it to all processes; whoever presses it again wants no kernel to be finished."""
    program = tmp_path / "program.py"
    program.write_text(LONG_QUEUE)
    child = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "asked\n"
    for _ in range(times):
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(0.3)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr
    assert _is_gone(child.pid, seconds=30)  # multiprocessing's own helper ends last


def _is_gone(group: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
