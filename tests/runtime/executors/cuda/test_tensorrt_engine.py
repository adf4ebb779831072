"""An engine whose dense regions are TensorRT segments: what it loads, refuses, queues and computes.

The builder and the package are stand-ins (fake_tensorrt.py): a segment is its ONNX model, computed by ONNX
Runtime where a GPU would run it. What real TensorRT makes of it has not been executed anywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, Launched
from fake_tensorrt import SYMBOL, FakeTensorRt
from next_token import NextToken

from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tensorrt import choice
from tapeout.compiler.tensorrt import segments as builder_side
from tapeout.compiler.tensorrt.builder import Built
from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Engine, View, open_engine
from tapeout.runtime.engine.program import STEP_INPUTS
from tapeout.runtime.executors import load_executor, memory_left
from tapeout.runtime.executors.cuda import CudaExecutor
from tapeout.runtime.step import StepInputs
from tapeout.runtime.tensorrt import segments as runtime_side
from tapeout.runtime.tensorrt.package import KINDS, RTX, Package

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[dev]'")

Step = Callable[..., StepInputs]
PAGES, VERSION = 8, "1.7.1.116"


@pytest.fixture(scope="module")
def segment_engine(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny float32 engine for sm_89 all of whose dense regions are segments, with two profiles."""
    folder = tmp_path_factory.mktemp("segments")
    options = BuildOptions(
        target="cuda:sm_89", dtype="float32", max_batch_size=4, max_num_tokens=16, max_seq_len=64,
        tokens_per_page=16, tactics="tensorrt",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder_side, "FEW_ROWS", 4)
        for module in (builder_side, choice):
            patch.setattr(module, "installed_version", {RTX: VERSION}.get)
        patch.setattr(
            builder_side, "_build",
            lambda models, *rest: {n: Built(model, ("kgen made_up",), 0.0) for n, model in models.items()},
        )  # fmt: skip
        build(str(models.make_tiny("llama", folder / "model")), folder / "model.engine", options)
    return folder / "model.engine"


@pytest.fixture
def engine(segment_engine: Path) -> Iterator[Engine]:
    with open_engine(segment_engine) as engine:
        yield engine


@pytest.fixture
def cuda(install: Callable[[FakeCuda], FakeCuda]) -> FakeCuda:
    return install(FakeCuda(sm=89, name="NVIDIA L4"))


@pytest.fixture
def tensorrt(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeTensorRt:
    fake = FakeTensorRt(cuda)
    monkeypatch.setattr(runtime_side, "installed_version", {RTX: VERSION}.get)
    monkeypatch.setattr(runtime_side, "load", lambda name: Package(KINDS[name], VERSION, fake.module))
    return fake


class Memory:
    """The arena and the step's inputs, as tensors of a moment."""

    def __init__(self, executor: CudaExecutor, engine: Engine) -> None:
        self._replay, self._engine = executor._replay, engine
        size = engine.program.arena_bytes
        raw = (ctypes.c_char * size).from_address(self._replay._memory.arena.address)
        self.arena = torch.from_numpy(np.frombuffer(raw, np.float32).copy())
        self._offsets = {b.name: b.offset_bytes // 4 for b in engine.program.buffers}

    def view(self, view: View, rows: dict[str, int]) -> torch.Tensor:
        shape = tuple(rows[d] if isinstance(d, str) else d for d in view.shape)
        if view.buffer in STEP_INPUTS:
            raw = (ctypes.c_int32 * shape[0]).from_address(self._replay._base(view.buffer))
            ids = torch.tensor(list(raw), dtype=torch.int32)
            # Padding rows hold what lay there: a segment must not read outside the table for them.
            return (
                ids.clamp(0, self._engine.manifest.model.vocab_size - 1)
                if view.buffer == "token_ids"
                else ids
            )
        return self.arena.as_strided(shape, view.strides, self._offsets[view.buffer] + view.offset)


def run_records(engine: Engine, memory: Memory, first: int, last: int, rows: dict[str, int]) -> None:
    """Records by their ops' references, in the memory given."""
    for record in engine.program.records[first:last]:
        weights = []
        for name in record.weights:
            data = engine.weight(name) if name else None
            weights.append(
                None if data is None
                else torch.from_numpy(np.frombuffer(data.data, np.float32).reshape(data.shape).copy())
            )  # fmt: skip
        inputs = [memory.view(view, rows).clone() for view in record.inputs]
        for view, result in zip(
            record.outputs, bind_reference(record.op, inputs, weights, record.attrs)(), strict=True
        ):
            memory.view(view, rows).copy_(result.reshape(memory.view(view, rows).shape))


def test_segments_compute_what_their_records_mean(
    engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt, step: Step
) -> None:
    """In one graph with the attention kernels, in place in the arena, in the profile of the bucket's rows."""
    executor = load_executor(engine, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    table = engine.launches
    assert table is not None
    address, size = executor._replay._memory.arena.address, engine.program.arena_bytes
    values = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32)
    ctypes.memmove(address, values.tobytes(), size)
    next_token, checked = NextToken(executor, engine), []

    def on_launch(launched: Launched) -> None:
        if launched.symbol != SYMBOL:
            next_token(launched)
            return
        region = table.regions[len(checked) % len(table.regions)]
        before = Memory(executor, engine)
        call = tensorrt.run(launched)
        rows = dict(zip("TR", bucket, strict=True))
        run_records(engine, before, region.first, region.last, rows)
        after = Memory(executor, engine)
        for record in engine.program.records[region.first : region.last]:
            for view in record.outputs:
                if view.buffer in region.outputs:
                    got, expected = after.view(view, rows), before.view(view, rows)
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        checked.append((call.profile, rows["T"]))

    cuda.on_launch = on_launch
    executor.admit(0, SamplingParams(temperature=0.0, max_tokens=8), np.zeros(0, np.int32))
    bucket = (4, 1)
    assert list(executor.submit(step((0, [1, 2, 3], 0, [0]))).result().token_ids) == [4]
    bucket = (1, 1)
    assert list(executor.submit(step((0, [4], 3, [0]))).result().token_ids) == [5]
    bucket = (8, 1)
    assert list(executor.submit(step((0, [5, 6, 7, 8, 9], 4, [0]))).result().token_ids) == [10]
    regions = len(table.regions)
    assert checked == [(0, 4)] * regions + [(0, 1)] * regions + [(1, 8)] * regions
    assert regions == 3
    # Each segment has run once ahead of every capture, at its rows: contexts change shapes there.
    assert [c.shapes["x0"][0] for c in tensorrt.outside] == [4] * 3 + [1] * 3 + [8] * 3
    assert {c.stream for c in (*tensorrt.calls, *tensorrt.outside)} == {int(executor._stream.handle)}
    # No kernel of a covered op is launched, and behind a segment nothing starts early.
    symbols = {x.symbol for x in cuda.launched}
    assert not [s for s in symbols if "linear" in s or "norm" in s or "gemm" in s], symbols
    assert {y.overlap for x, y in pairwise(cuda.launched) if x.symbol == SYMBOL} == {False}
    executor.close()
    assert not any(cuda.open.values())


def test_a_bucket_that_was_captured_queues_nothing_again(
    engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt, step: Step
) -> None:
    executor = load_executor(engine, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    next_token = NextToken(executor, engine)
    cuda.on_launch = lambda launched: None if launched.symbol == SYMBOL else next_token(launched)
    executor.admit(0, SamplingParams(temperature=0.0, max_tokens=8), np.zeros(0, np.int32))
    executor.submit(step((0, [1, 2, 3], 0, [0]))).result()
    queued = len(tensorrt.calls), len(tensorrt.outside)
    executor.submit(step((0, [4, 5, 6], 3, [0]))).result()
    assert (len(tensorrt.calls), len(tensorrt.outside)) == queued
    executor.close()


def test_padding_asks_for_rows_that_are_there(
    engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt, step: Step
) -> None:
    """After a step that asked for row 15, one of three rows in a bucket of four: none reads row 15."""
    executor = load_executor(engine, num_pages=PAGES)
    assert isinstance(executor, CudaExecutor)
    next_token = NextToken(executor, engine)
    cuda.on_launch = lambda x: tensorrt.run(x) and None if x.symbol == SYMBOL else next_token(x)
    for slot in range(4):
        executor.admit(slot, SamplingParams(temperature=0.0, max_tokens=8), np.zeros(0, np.int32))
    prompts = [(slot, [1, 2, 3, 4], 0, [slot]) for slot in range(4)]
    assert list(executor.submit(step(*prompts)).result().token_ids) == [5] * 4
    next_step = [(slot, [5], 4, [slot]) for slot in range(3)]
    assert list(executor.submit(step(*next_step)).result().token_ids) == [6] * 3
    executor.close()


def test_contexts_and_kernels_share_the_workspace(
    engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt
) -> None:
    """What TensorRT wants counts in the budget, once."""
    table = engine.launches
    assert table is not None
    own = table.workspace_bytes + table.scratch_bytes
    small = memory_left(engine)
    tensorrt.memory_bytes = own + 100_000
    large = memory_left(engine)
    # The second profile wants a byte more (fake_tensorrt.py).
    assert small - large == 100_001


@pytest.mark.parametrize(
    ("version", "have"), [(None, "which is not installed"), ("1.6.1.120", "this machine has 1.6.1.120")]
)
def test_a_machine_without_the_package_it_was_built_with(
    version: str | None, have: str, engine: Engine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_side, "installed_version", {RTX: version}.get)
    for load in (lambda: load_executor(engine, num_pages=PAGES), lambda: memory_left(engine)):
        with pytest.raises(EngineIncompatibleError, match=f"are for TensorRT-RTX {VERSION}, {have}") as told:
            load()
        assert f"pip install 'tensorrt-rtx-cu13=={VERSION}'" in str(told.value.hint)
    assert not any(cuda.open.values())


def test_a_segment_that_the_gpu_refuses(engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt) -> None:
    tensorrt.refuses = True
    with pytest.raises(EngineIncompatibleError, match=r"refuses segment .* on this GPU: .*made up by a test"):
        load_executor(engine, num_pages=PAGES)
    assert not any(cuda.open.values())


def test_another_gpu_is_refused_by_name(
    engine: Engine, install: Callable[[FakeCuda], FakeCuda], tensorrt: FakeTensorRt
) -> None:
    install(FakeCuda(sm=90, name="NVIDIA H200"))
    with pytest.raises(EngineIncompatibleError, match="for sm_89; this GPU is NVIDIA H200, sm_90"):
        load_executor(engine, num_pages=PAGES)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda t: replace(t, regions=t.regions[1:]),
            r"record 0 \(embedding\) has neither launches nor a segment",
        ),
        (lambda t: replace(t, segments=t.segments[:1]), "segment 1 does not exist"),
        (lambda t: replace(t, regions=(t.regions[0], *t.regions)), "overlaps another"),
        (
            lambda t: replace(t, segments=(replace(t.segments[0], blob="x.plan"), *t.segments[1:])),
            "no segment x.plan",
        ),
    ],
)
def test_a_table_with_a_gap_is_refused(
    change: Callable[[Any], Any], told: str, engine: Engine, cuda: FakeCuda, tensorrt: FakeTensorRt
) -> None:
    """Nothing is skipped in silence."""
    engine.launches = change(engine.launches)
    with pytest.raises(EngineIncompatibleError, match=told):
        load_executor(engine, num_pages=PAGES)
    assert not any(cuda.open.values())
