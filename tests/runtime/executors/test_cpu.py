"""The CPU executor on a small real model, against plain torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.plugins.native import compile_native, detect_host
from tapeout.plugins.registry import cpu_tactics
from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Engine, Program, TacticRange, open_engine
from tapeout.runtime.engine.program import STEP_INPUTS
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cpu import CpuExecutor, replay
from tapeout.runtime.step import FROM_SLOT, StepInputs

Step = Callable[..., StepInputs]
Reference = Callable[[Sequence[int]], np.ndarray]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
A, B, C = [3, 14, 15, 9, 2], [6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3]
NO_PROMPT = np.zeros(0, np.int32)


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_packed_prefill_then_decode(executor: CpuExecutor, step: Step, reference: Reference) -> None:
    logits = executor.forward(step((0, A, 0, [7, 2]), (1, B, 0, [0])))
    close(logits, np.stack([reference(A)[-1], reference(B)[-1]]))
    # Decode of both, the page table of the first grows; slots in another order.
    logits = executor.forward(step((1, [11], 3, [0]), (0, [4], 5, [7, 2])))
    close(logits, np.stack([reference([*B, 11])[-1], reference([*A, 4])[-1]]))


def test_chunked_prefill_beside_decode(executor: CpuExecutor, step: Step, reference: Reference) -> None:
    executor.forward(step((0, A, 0, [1, 2])))
    # A chunk that samples nothing next to a generation row, then the rest of it.
    logits = executor.forward(step((2, C[:5], 0, [3, 4]), (0, [1], 5, [1, 2]), sample=[1]))
    close(logits, reference([*A, 1])[-1:])
    assert executor.forward(step((2, C[5:7], 5, [3, 4]), sample=[])).shape == (0, 29)
    close(executor.forward(step((2, C[7:], 7, [3, 4]))), reference(C)[-1:])


def test_steps_queued_ahead_read_ids_from_slots(
    executor: CpuExecutor, step: Step, reference: Reference
) -> None:
    executor.admit(1, GREEDY, np.array(A, np.int32))
    executor.admit(2, GREEDY, np.array(B, np.int32))
    handles = [executor.submit(step((1, A, 0, [7, 2, 3]), (2, B, 0, [5, 6])))]
    for i in range(4):
        handles.append(
            executor.submit(step((2, [FROM_SLOT], 3 + i, [5, 6]), (1, [FROM_SLOT], 5 + i, [7, 2, 3])))
        )
    got = [h.result() for h in handles]
    for ids, column, later in ((A, 0, 1), (B, 1, 0)):
        sequence, produced = list(ids), []
        for _ in range(5):
            produced.append(int(reference(sequence)[-1].argmax()))
            sequence.append(produced[-1])
        assert [int(got[0].token_ids[column]), *(int(g.token_ids[later]) for g in got[1:])] == produced
    assert all(g.finite.all() for g in got)


def test_a_failed_step_surfaces_and_later_ones_run(
    executor: CpuExecutor, step: Step, reference: Reference
) -> None:
    executor.admit(0, GREEDY, NO_PROMPT)
    executor.submit(step((0, A, 0, [1, 2]))).result()
    bad = executor.submit(step((0, [99], 5, [1, 2])))  # no such token
    executor.admit(1, GREEDY, NO_PROMPT)
    depends = executor.submit(step((1, A, 0, [3, 4]), (0, [FROM_SLOT], 5, [1, 2])))
    again = executor.submit(step((1, [FROM_SLOT], 5, [3, 4]), (0, [FROM_SLOT], 6, [1, 2])))
    fine = executor.submit(step((0, [4], 5, [1, 2])))
    with pytest.raises(TapeoutError, match=r"token ids outside \[0, 29\)"):
        bad.result()
    first = int(reference(A)[-1].argmax())
    for result, id_of_other in (
        (depends.result(), first),
        (again.result(), int(reference([*A, first])[-1].argmax())),
    ):
        assert result.finite.tolist() == [True, False]  # its row is no token, whatever id it ran on
        assert int(result.token_ids[0]) == id_of_other  # and no concern of others
    with pytest.raises(TapeoutError, match="or a slot without one"):
        executor.submit(step((2, [FROM_SLOT], 5, [1, 2]))).result()
    assert fine.result().token_ids[0] == reference([*A, 4])[-1].argmax()


def test_a_new_request_does_not_see_the_last_id_of_its_slot(executor: CpuExecutor, step: Step) -> None:
    executor.admit(0, GREEDY, NO_PROMPT)
    executor.submit(step((0, A, 0, [1, 2]))).result()
    executor.admit(0, GREEDY, NO_PROMPT)
    with pytest.raises(TapeoutError, match="a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 5, [1, 2]))).result()


def test_a_failed_admission_surfaces_from_its_slot_only(executor: CpuExecutor, step: Step) -> None:
    executor.admit(0, None, NO_PROMPT)  # type: ignore[arg-type]
    executor.admit(1, GREEDY, NO_PROMPT)
    with pytest.raises(AttributeError):
        executor.submit(step((0, A, 0, [1, 2]))).result()
    executor.submit(step((1, A, 0, [1, 2]))).result()
    with pytest.raises(UsageError, match="slot 3 does not exist"):
        executor.admit(3, GREEDY, NO_PROMPT)


def test_all_faults_of_a_step_are_listed(executor: CpuExecutor, step: Step) -> None:
    inputs = step((0, A, 0, [1, 10]))  # page 10 does not exist
    inputs = replace(inputs, positions=inputs.positions + 40, row_ids=np.array([5], np.int32))
    with pytest.raises(TapeoutError) as error:
        executor.submit(inputs).result()
    for part in ("positions outside [0, 40)", "page ids outside [0, 10)", "logit rows outside [0, 5)"):
        assert part in error.value.message
    with pytest.raises(TapeoutError, match="13 token rows, expected 1 to 12"):
        executor.submit(step((0, [1] * 13, 0, [0, 1, 2, 3]))).result()
    with pytest.raises(TapeoutError, match="a page table of 1 pages for 2"):
        executor.submit(step((0, A, 0, [1]))).result()


def test_rows_that_are_not_finite_are_flagged(executor: CpuExecutor, step: Step) -> None:
    executor.admit(0, GREEDY, NO_PROMPT)
    executor.admit(1, GREEDY, NO_PROMPT)
    executor._state.kv_pool[5] = float("nan")  # as a fault in an earlier step would leave it
    inputs = step((0, [1], 3, [5]), (1, [1], 3, [6]))
    assert executor.submit(inputs).result().finite.tolist() == [False, True]
    executor.submit(step((0, [FROM_SLOT], 4, [5, 7]))).result()  # was planned ahead: must not fail


def test_every_output_lies_in_its_buffer_and_in_the_arena(executor: CpuExecutor, program: Program) -> None:
    arena = executor._arena
    begin, end = arena.data_ptr(), arena.data_ptr() + program.arena_bytes
    assert arena.numel() == program.arena_bytes
    buffers = {b.name: b for b in program.buffers}
    for t, r in ((1, 1), (12, 3)):
        for record in program.records:
            for view in record.outputs:
                assert view.buffer not in STEP_INPUTS
                tensor = executor._replay._tensor(view, {"T": t, "R": r})
                first = tensor.data_ptr()
                last = (
                    first
                    + sum((d - 1) * s for d, s in zip(tensor.shape, tensor.stride(), strict=True)) * 4
                    + 4
                )
                buffer = buffers[view.buffer]
                assert begin + buffer.offset_bytes <= first < last
                assert last <= begin + buffer.offset_bytes + buffer.size_bytes <= end


def test_weights_are_not_copied(executor: CpuExecutor, engine: Engine) -> None:
    weight = engine.weight("embed")
    mapped = torch.frombuffer(weight.data, dtype=torch.float32)
    assert executor._replay._weights.tensor("embed").data_ptr() == mapped.data_ptr()


class Recorder:
    """Wraps the tactics of the registry and notes prepare and bind."""

    def __init__(self) -> None:
        self.prepared: list[tuple[str, str]] = []
        self.bound: list[tuple[str, str, int]] = []

    def tactics(self, op: str) -> list[Any]:
        recorder, real = self, self.real(op)

        class Noting:
            def __init__(self, tactic: Any) -> None:
                self.tactic, self.op, self.name = tactic, tactic.op, tactic.name

            def prepare(self, *arguments: Any) -> Any:
                recorder.prepared.append((self.op, self.name))
                return self.tactic.prepare(*arguments)

            def bind(self, call: Any) -> Any:
                recorder.bound.append((self.op, self.name, call.outputs[0].shape[0]))
                return self.tactic.bind(call)

        return [Noting(t) for t in real]

    real = staticmethod(replay.cpu_tactics)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(replay, "cpu_tactics", recorder.tactics)
    return recorder


def test_ranges_choose_tactics_by_the_rows_of_the_output(
    recorder: Recorder, engine: Engine, step: Step
) -> None:
    executor = load_executor(engine, num_pages=10, threads=2)
    # 4 weights in T rows and the head in R rows, each for two tactics; nothing else has two.
    assert recorder.prepared.count(("linear", "aten")) == recorder.prepared.count(("linear", "onednn")) == 5
    assert ("paged_attention", "gather_sdpa") not in recorder.prepared
    executor.forward(step((0, A, 0, [1, 2])))
    assert [b[1:] for b in recorder.bound if b[0] == "linear"] == [("onednn", 5)] * 4 + [("aten", 1)]
    executor.close()


def test_a_bucket_is_bound_once_and_the_oldest_is_dropped(
    recorder: Recorder, engine: Engine, step: Step
) -> None:
    executor = load_executor(engine, num_pages=10, threads=2, max_buckets=2)
    embeddings = []
    for n in (1, 2, 1, 3, 1, 2):
        executor.forward(step((0, A[:n], 0, [1, 2])))
        embeddings.append(sum(b[0] == "embedding" for b in recorder.bound))
    assert embeddings == [1, 2, 2, 3, 3, 4]
    executor.close()


def test_records_with_the_same_weights_share_what_was_prepared(
    recorder: Recorder, program: Program, write_model: Callable[..., Path]
) -> None:
    last = program.records[-1]
    with open_engine(write_model(program=replace(program, records=(*program.records, last)))) as engine:
        load_executor(engine, num_pages=10).close()
    assert recorder.prepared.count(("linear", "onednn")) == 5


def test_kernels_of_the_engine_run(
    program: Program, write_model: Callable[..., Path], step: Step, reference: Reference
) -> None:
    kernels = {"native.so": compile_native(detect_host().level)}
    native = {
        op for op in {r.op for r in program.records} if any(t.name == "native" for t in cpu_tactics(op))
    }
    assert {"linear", "paged_attention"} <= native
    tactics = {
        key: tuple(TacticRange(r.max_rows, "native") for r in ranges)
        if key.split("(")[0] in native
        else ranges
        for key, ranges in program.tactics.items()
    }
    path = write_model(program=replace(program, tactics=tactics), kernels=kernels)
    with open_engine(path) as engine:
        executor = load_executor(engine, num_pages=10, threads=2)
        close(
            executor.forward(step((0, A, 0, [7, 2]), (1, B, 0, [0]))),
            np.stack([reference(A)[-1], reference(B)[-1]]),
        )
        close(executor.forward(step((0, [4], 5, [7, 2]))), reference([*A, 4])[-1:])
        executor.close()


def test_releasing_weights_changes_nothing_but_memory(
    recorder: Recorder, engine: Engine, executor: CpuExecutor, step: Step
) -> None:
    recorder.prepared.clear()
    lean = load_executor(engine, num_pages=10, threads=2, release_weights=True)
    assert recorder.prepared == []
    for inputs in (step((0, A, 0, [1, 2])), step((0, [4], 5, [1, 2])), step((0, [4], 6, [1, 2]))):
        np.testing.assert_array_equal(lean.forward(inputs), executor.forward(inputs))
    assert recorder.prepared.count(("linear", "onednn")) == 4  # again at every use, never kept
    lean.close()


def test_too_little_memory_is_told_line_by_line(engine: Engine) -> None:
    with pytest.raises(CapacityError) as error:
        load_executor(engine, num_pages=1 << 40)
    text = error.value.render()
    assert all(
        part in text
        for part in ("weights", "arena", "kv cache (1099511627776 pages of 4 tokens)", "available")
    )
    assert "hint: the largest part is kv cache" in text


def test_a_failing_allocation_is_told_the_same_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr("tapeout.runtime.executors.cpu.executor.allocate_step_state", fail)
    with pytest.raises(CapacityError, match="arena"):
        load_executor(engine, num_pages=1)


def test_bad_options(engine: Engine) -> None:
    with pytest.raises(UsageError, match="num_pages is 0, expected at least 1\nthreads is -1"):
        load_executor(engine, num_pages=0, threads=-1)


def test_unknown_tactics_are_listed(program: Program, write_model: Callable[..., Path]) -> None:
    keys = [r.signature for r in program.records if r.op in ("rope", "add")]
    tactics = {**program.tactics, **{k: (TacticRange(12, "magic"),) for k in keys}}
    with (
        open_engine(write_model(program=replace(program, tactics=tactics))) as engine,
        pytest.raises(EngineIncompatibleError, match="add/magic, rope/magic"),
    ):
        load_executor(engine, num_pages=1)


@pytest.mark.parametrize("target", ["cuda:h200", "cpu:none"])
def test_other_targets_are_refused(write_model: Callable[..., Path], target: str) -> None:
    with (
        open_engine(write_model(target=target)) as engine,
        pytest.raises(EngineIncompatibleError, match=target),
    ):
        load_executor(engine, num_pages=1)


def test_closed_executor(engine: Engine, step: Step) -> None:
    executor = load_executor(engine, num_pages=4)
    queued = executor.submit(step((0, A, 0, [1, 2]), sample=[]))
    executor.close()
    executor.close()
    assert queued.result().token_ids.shape == (0,)
    with pytest.raises(TapeoutError, match="closed"):
        executor.forward(step((0, A, 0, [1, 2])))


def test_importing_executors_does_not_import_torch() -> None:
    code = "import sys, tapeout.runtime.executors, tapeout.runtime.engine; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
