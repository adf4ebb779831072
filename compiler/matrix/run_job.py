"""The tasks of one job: the model is opened and traced once, kernels are compiled by processes that stay."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tapeout.compiler.build import build
from tapeout.compiler.build_pack import build_pack
from tapeout.compiler.front_end import FrontEnd
from tapeout.compiler.limits import target_kind
from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.matrix.job import PACK, Event, Job, Task
from tapeout.compiler.matrix.kernels_ahead import KernelsAhead
from tapeout.compiler.matrix.machine import Machine
from tapeout.compiler.peak_memory import peak_memory_bytes
from tapeout.compiler.progress import PacedDetail
from tapeout.compiler.targets import cuda_target
from tapeout.plugins.errors import TRACEBACK_VARIABLE, CapacityError, TapeoutError, as_known
from tapeout.plugins.native import compile_native, detect_host
from tapeout.plugins.triton_aot import compilers

Tell = Callable[[Event], None]


def run_job(job: Job, tell: Tell) -> None:
    """Do all tasks; one that fails does not stop the others.

    After a process that compiles kernels was killed the rest is left, for another process to do.
    """
    with ExitStack() as stack:
        machine = Machine(job.lock)
        stack.callback(machine.close)
        kinds = {target_kind(task.options) for task in job.tasks}
        native = threading.Thread(target=_compile_native, daemon=True)
        if "cpu" in kinds:
            native.start()
        if "cuda" in kinds:
            stack.enter_context(compilers(job.kernel_workers))
        front_end = FrontEnd(job.source)
        ahead = KernelsAhead(job.tasks, front_end)
        for task in job.tasks:
            if not _run(task, job, front_end, ahead, machine, native, tell):
                return


def _run(
    task: Task,
    job: Job,
    front_end: FrontEnd,
    ahead: KernelsAhead,
    machine: Machine,
    native: threading.Thread,
    tell: Tell,
) -> bool:
    """Do one task; False when this process can do no other."""
    start = time.perf_counter()
    tell(Event("started", task.title))

    @contextmanager
    def timing() -> Iterator[None]:
        if target_kind(task.options) == "cpu":
            native.join()
        elif local_gpu(task.options.target, cuda_target(task.options.target).sm) is None:
            ahead.begin()
            yield  # nothing is timed
            return
        with machine.alone():
            yield

    try:
        details = _make(task, job.source, front_end, timing, ahead.after(task), _Stages(task.title, tell))
    except Exception as error:  # any failure is this task's alone
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        known = as_known(error)
        seconds = time.perf_counter() - start
        peak = peak_memory_bytes()
        tell(Event("failed", task.title, known.message, known.hint, known.exit_code, seconds, peak))
        return not (isinstance(known, CapacityError) and known.__cause__ is not None)
    seconds = time.perf_counter() - start
    tell(Event("done", task.title, seconds=seconds, peak_memory_bytes=peak_memory_bytes(), details=details))
    return True


def _make(
    task: Task,
    source: str,
    front_end: FrontEnd,
    timing: Callable[[], Any],
    ahead: Callable[[], None] | None,
    progress: _Stages,
) -> dict[str, Any]:
    if task.kind == PACK:
        pack = build_pack(source, task.options, progress, front_end=front_end)
        if not pack.entries:  # the timing cache answers everything
            task.output.unlink()
        return {"entries": pack.entries, "candidates": pack.candidates, "stage_seconds": pack.stage_seconds}
    report = build(
        source, task.output, task.options, progress, front_end=front_end, timing=timing, ahead=ahead
    )
    return {
        "dtype": report.dtype,
        "quantize": report.quantize,
        "timed": report.timed,
        "parity": report.parity.get("verdict", "unknown"),
        "file_bytes": dict(report.file_bytes),
        "stage_seconds": dict(report.stage_seconds),
        "warnings": list(report.warnings),
    }


class _Stages:
    """Tells the stages of one task, and of one under way for long its detail from time to time.

    `clock` gives seconds.
    """

    def __init__(self, title: str, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._tell, self._clock = title, tell, clock

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[PacedDetail]:
        self._tell(Event("stage", self._title, name))
        yield PacedDetail(
            "", lambda text: self._tell(Event("stage", self._title, f"{name} ... {text}")), self._clock
        )

    def info(self, text: str) -> None:
        pass


def _compile_native() -> None:
    """Begin with what a CPU engine needs; why it fails is told where it is needed."""
    with suppress(TapeoutError, OSError):
        compile_native(detect_host().level)
