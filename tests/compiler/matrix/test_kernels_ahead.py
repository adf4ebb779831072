"""Kernels of GPU engines: begun once nothing must be quiet any more, and exactly those that they want."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_kernels import compile_nothing

from tapeout.compiler import choose, cuda_plan
from tapeout.compiler.build import build
from tapeout.compiler.front_end import FrontEnd
from tapeout.compiler.matrix import kernels_ahead
from tapeout.compiler.matrix.job import ENGINE, PACK, Task
from tapeout.compiler.matrix.kernels_ahead import KernelsAhead
from tapeout.compiler.options import BuildOptions
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.target import GpuFacts

LIMITS = {"max_batch_size": 2, "max_num_tokens": 4, "max_seq_len": 64, "tokens_per_page": 16}


def task(target: str, kind: str = ENGINE, **options: Any) -> Task:
    return Task(f"m/{target}", kind, Path("m.engine"), BuildOptions(target=target, **options))


class Recorder:
    """Stands for what asks for the kernels of one engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: GpuFacts | None = None) -> None:
        self.asked: list[str] = []
        monkeypatch.setattr(kernels_ahead, "compile_ahead_for_cuda", self._ask)
        monkeypatch.setattr(
            kernels_ahead, "local_gpu", lambda target, sm: gpu if gpu is not None and gpu.sm == sm else None
        )
        lowered = SimpleNamespace(source=None, module=None, limits=None)
        self.front_end: Any = SimpleNamespace(lower=lambda options, stages, check: lowered)

    def _ask(self, source: Any, module: Any, limits: Any, target: str, options: BuildOptions) -> None:
        self.asked.append(target)
        if target == "cuda:sm_80":
            raise UsageError("its timing cache cannot be read")


def test_after_the_last_cpu_engine_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    one, two = task("cpu"), task("cpu", batch_invariant=True)
    gpus = [task("cuda:sm_80"), task("cuda:sm_90"), task("cuda:l4", tactics="tensorrt")]
    ahead = KernelsAhead([one, two, *gpus], recorder.front_end)
    assert ahead.after(one) is None, "the second one is timed in quiet"
    begin = ahead.after(two)
    assert begin is not None
    assert recorder.asked == []
    begin()
    assert recorder.asked == ["cuda:sm_80", "cuda:sm_90"], "the first one's failure is its own"
    ahead.begin()
    assert ahead.after(two) is None
    assert len(recorder.asked) == 2


def test_never_where_a_gpu_is_timed_or_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, GpuFacts("NVIDIA H200", 90, 132, 141 << 30, 13000))
    cpu = task("cpu")
    ahead = KernelsAhead([cpu, task("cuda:sm_80"), task("cuda:sm_90")], recorder.front_end)
    assert ahead.after(cpu) is None
    ahead.begin()
    KernelsAhead([task("cuda:sm_80", PACK)], recorder.front_end).begin()
    assert KernelsAhead([cpu], recorder.front_end).after(cpu) is None
    assert recorder.asked == []


def test_exactly_the_kernels_of_the_engine(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.make_tiny("llama", tmp_path / "m", seed=0)
    begun, compiled = set[tuple[str, int]](), set[tuple[str, int]]()

    def note(specs: Any, sm: int, **options: Any) -> Any:
        compiled.update((spec.key(), sm) for spec in specs)
        return compile_nothing(specs, sm, **options)

    monkeypatch.setattr(
        choose, "compile_ahead", lambda specs, sm: begun.update((spec.key(), sm) for spec in specs)
    )
    monkeypatch.setattr(cuda_plan, "compile_all", note)
    monkeypatch.setattr(kernels_ahead, "local_gpu", lambda target, sm: None)
    front_end = FrontEnd(str(tmp_path / "m"))
    tasks = [task(f"cuda:sm_{sm}", **LIMITS) for sm in (80, 90)]
    KernelsAhead(tasks, front_end).begin()
    assert compiled == set(), "nothing waits for a kernel"
    for each in tasks:
        build(str(tmp_path / "m"), tmp_path / "m.engine", each.options, front_end=front_end)
    assert begun == compiled
    assert {sm for _, sm in begun} == {80, 90}
