"""Kernels of a job's GPU engines, begun before these engines are: processors that would wait work on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from tapeout.compiler.choose import compile_ahead_for_cuda
from tapeout.compiler.front_end import FrontEnd, Stages
from tapeout.compiler.limits import target_kind
from tapeout.compiler.local_gpu import local_gpu
from tapeout.compiler.matrix.job import ENGINE, Task
from tapeout.compiler.progress import SilentProgress
from tapeout.compiler.targets import cuda_target
from tapeout.plugins.cuda import TENSORRT


class KernelsAhead:
    """Lets the processes of `compilers` begin with the kernels of all GPU engines at once, when no tactic of
    a CPU must be timed any more; never where this machine has a GPU that one of them is timed on."""

    def __init__(self, tasks: Sequence[Task], front_end: FrontEnd) -> None:
        self._front_end = front_end
        on_gpus = [t for t in tasks if t.kind == ENGINE and target_kind(t.options) == "cuda"]
        quiet = any(local_gpu(t.options.target, cuda_target(t.options.target).sm) for t in on_gpus)
        # What TensorRT's segments leave to other kernels is known when they are built.
        self._left = [] if quiet else [t for t in on_gpus if t.options.tactics != TENSORRT]
        on_cpu = [t for t in tasks if target_kind(t.options) == "cpu"]
        self._last_on_cpu = on_cpu[-1] if on_cpu else None

    def after(self, task: Task) -> Callable[[], None] | None:
        """What to do when the tactics of `task` are chosen: begin, after the last one for a CPU."""
        return self.begin if self._left and task is self._last_on_cpu else None

    def begin(self) -> None:
        """Ask for all kernels; the second time there is nothing left to ask for."""
        while self._left:
            with suppress(Exception):  # the engine's own build tells what is wrong
                self._ask(self._left.pop(0))

    def _ask(self, task: Task) -> None:
        front = self._front_end.lower(task.options, Stages(SilentProgress()), lambda source: None)
        compile_ahead_for_cuda(front.source, front.module, front.limits, task.options.target, task.options)
