"""The CUDA executor's steps on a driver made of host memory: what it launches, copies and frees.

The engine and its launches are real, the kernels are not run (see next_token.py). Numbers are checked
on a GPU (docs/cuda.md).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from next_token import NextToken

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.state import bits_row, counts_row, id_bits, state_words
from tapeout.runtime import LLM
from tapeout.runtime.engine import Engine
from tapeout.runtime.executors.cuda import CudaExecutor
from tapeout.runtime.executors.cuda import executor as executor_module
from tapeout.runtime.executors.cuda.replay import Bucket
from tapeout.runtime.step import FROM_SLOT, StepInputs

Step = Callable[..., StepInputs]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PENALIZED = SamplingParams(temperature=0.0, max_tokens=8, repetition_penalty=1.01)
NO_PROMPT = np.zeros(0, np.int32)
VOCAB, PAGES = 300, 8


def greedy(executor: CudaExecutor, *slots: int) -> None:
    for slot in slots:
        executor.admit(slot, GREEDY, NO_PROMPT)


def ids_of(handle: Any) -> list[int]:
    return list(map(int, handle.result().token_ids))


def test_steps_queued_ahead_read_ids_from_slots(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 1, 3)
    handles = [executor.submit(step((1, [7, 8, 9], 0, [5]), (3, [20], 0, [2])))]
    # More steps than results the executor keeps: the oldest are read before their buffers are reused.
    for i in range(7):
        handles.append(executor.submit(step((3, [FROM_SLOT], 1 + i, [2]), (1, [FROM_SLOT], 3 + i, [5]))))
    assert ids_of(handles[0]) == [10, 21]
    assert [ids_of(h) for h in handles[1:]] == [[22 + i, 11 + i] for i in range(7)]
    assert handles[0].result() is handles[0].result()
    assert all(h.result().finite.all() for h in handles)
    assert cuda.graph_launches == 8
    assert cuda.open["exec"] == 2  # 4 rows and 2 rows


def test_what_is_launched_is_what_the_kernels_take(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [1, 2, 3], 0, [0]))).result()
    table = engine.launches
    assert table is not None
    program = engine.program
    kernels = {k.symbol: k for k in table.kernels}
    assert cuda.launched[0].symbol == "receive"
    assert cuda.launched[-1].symbol == "choose"
    assert len(cuda.launched) >= len(program.records) + 3
    for launched in cuda.launched:
        assert launched.symbol in kernels
        assert all(n >= 1 for n in launched.grid)
        for value, type_ in zip(launched.values, launched.types, strict=True):
            if type_ is ctypes.c_void_p and value:
                assert cuda.holds(int(value)), launched.symbol
                assert int(value) % 16 == 0 or "step" in launched.symbol, launched.symbol
    weights = {
        v for x in cuda.launched for v, t in zip(x.values, x.types, strict=True) if t is ctypes.c_void_p
    }
    for name in engine.weights:
        assert executor._replay._memory.weights.address(name) in weights, name


def test_weights_arrive_unchanged(executor: CudaExecutor, engine: Engine) -> None:
    for name, info in engine.weights.items():
        address = executor._replay._memory.weights.address(name)
        assert ctypes.string_at(address, info.size_bytes) == bytes(engine.weight(name).data), name


def test_forward_leaves_the_slots_alone(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    cuda.launched.clear()
    for _ in range(2):
        logits = executor.forward(step((0, [FROM_SLOT], 1, [1])))
        assert logits.shape == (1, VOCAB)
        assert logits.dtype == np.float32
        assert logits.argmax() == 7  # after 6, both times
    assert "choose" not in {x.symbol for x in cuda.launched}
    assert executor.forward(step((0, [1, 2], 0, [1]), sample=[])).shape == (0, VOCAB)


def test_requests_the_device_cannot_sample_go_through_the_host(
    executor: CudaExecutor, step: Step, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "device_unsupported", lambda p: "no" if p.min_p else None)
    greedy(executor, 0)
    # What the host samples is told from what the device would: it never returns to an id.
    on_host = replace(PENALIZED, min_p=0.1, presence_penalty=2.0, logprobs=1)
    executor.admit(1, on_host, NO_PROMPT)
    executor.admit(2, replace(GREEDY, logprobs=0), NO_PROMPT)
    result = executor.submit(step((0, [5], 0, [1]), (1, [9], 0, [2]), (2, [40], 0, [3]))).result()
    assert result.token_ids.tolist() == [6, 10, 41]
    assert [None if x is None else list(x) for x in result.logprobs] == [None, [10], [41]]
    # The slots go on from what the host chose, on the device as well.
    handles = [
        executor.submit(step((0, [FROM_SLOT], 1, [1]))), executor.submit(step((1, [FROM_SLOT], 1, [2]))),
        executor.submit(step((1, [9], 2, [2]))),
    ]  # fmt: skip
    assert [ids_of(h) for h in handles] == [[7], [11], [0]]


def test_the_device_is_told_what_sampling_needs(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    """Ids of the prompt, zeroed counts and masked ids, of those requests alone that need them."""
    addresses, facts = executor._sampled.addresses(), engine.manifest.tokenizer
    assert facts is not None
    bits, counts = 4 * bits_row(VOCAB), 4 * counts_row(VOCAB)
    ctypes.memset(addresses["sample_bits"], 0xAA, 4 * 2 * bits)
    ctypes.memset(addresses["output_counts"], 0xAA, 4 * counts)
    prompt = np.array([7, 299, 7], np.int32)
    params = {
        0: GREEDY,
        1: replace(PENALIZED, logprobs=3),
        2: replace(GREEDY, min_tokens=2, stop_token_ids=(33, 5000)),
    }
    for slot, request in params.items():
        executor.admit(slot, request, prompt)
    executor.submit(step((0, [1], 0, [0]), (1, [1], 0, [1]), (2, [1], 0, [2]))).result()

    def bytes_at(name: str, start: int, size: int) -> bytes:
        return ctypes.string_at(addresses[name] + start, size)

    untouched = b"\xaa" * bits
    assert bytes_at("sample_bits", 0, 2 * bits) == 2 * untouched
    assert bytes_at("sample_bits", 2 * bits, bits) == id_bits(prompt, VOCAB).tobytes()
    assert bytes_at("sample_bits", 3 * bits, 2 * bits) == 2 * untouched
    masked = id_bits(np.array([33, *facts.eos_token_ids]), VOCAB)
    assert bytes_at("sample_bits", 5 * bits, bits) == masked.tobytes()
    assert bytes_at("output_counts", counts, counts) == bytes(counts)
    for slot in (0, 2, 3):
        assert bytes_at("output_counts", slot * counts, counts) == b"\xaa" * counts
    for slot, request in params.items():
        assert bytes_at("sample_state", 64 * slot, 64) == state_words(request).tobytes()


def test_a_paused_request_goes_on_with_its_counts(executor: CudaExecutor) -> None:
    """What it sampled before is output for penalties and `min_tokens`, in whatever slot it goes on."""
    addresses, counts = executor._sampled.addresses(), counts_row(VOCAB)
    ctypes.memset(addresses["output_counts"], 0xAA, 4 * 4 * counts)
    prompt, output = np.array([7, 299, 7], np.int32), np.array([5, 11, 5, 5], np.int32)
    request = replace(PENALIZED, min_tokens=6)
    executor.admit(2, request, prompt, output)
    row = np.frombuffer(ctypes.string_at(addresses["output_counts"] + 8 * counts, 4 * counts), np.int32)
    assert {int(i): int(row[i]) for i in np.flatnonzero(row)} == {5: 3, 11: 1}
    state = ctypes.string_at(addresses["sample_state"] + 2 * 64, 64)
    assert state == state_words(request, 4).tobytes()
    assert np.frombuffer(state, np.int32)[14] == 4
    bits = 4 * bits_row(VOCAB)
    assert ctypes.string_at(addresses["sample_bits"] + 4 * bits, bits) == id_bits(prompt, VOCAB).tobytes()


def test_only_steps_that_need_it_run_the_full_kernels(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    assert engine.launches is not None
    greedy(executor, 0)
    executor.admit(1, PENALIZED, NO_PROMPT)

    def symbols(inputs: StepInputs) -> list[str]:
        cuda.launched.clear()
        executor.submit(inputs).result()
        return [launched.symbol for launched in cuda.launched]

    plain, full = symbols(step((0, [5], 0, [1]))), symbols(step((1, [9], 0, [2])))
    assert plain[-2:] == ["partial_max", "choose"]
    assert full == [*plain, "partial_logprobs", "merge_logprobs"]
    assert symbols(step((0, [FROM_SLOT], 1, [1]))) == plain
    greedy(executor, 1)  # the slot's next request needs less
    assert symbols(step((1, [9], 0, [2]))) == plain
    assert cuda.open["exec"] == 2


def test_logprobs_come_home_with_the_ids(executor: CudaExecutor, step: Step) -> None:
    asked = {0: 2, 1: None, 2: 0, 3: 20}
    for slot, top_n in asked.items():
        executor.admit(slot, replace(GREEDY, logprobs=top_n), NO_PROMPT)
    inputs = step(*((slot, [10 * slot], 0, [slot]) for slot in asked))
    handles = [executor.submit(inputs), executor.submit(step((1, [FROM_SLOT], 1, [1])))]
    greedy(executor, *asked)  # results of the requests before are still theirs
    rows, likely = handles[0].result().logprobs, -float(np.log(1 + 299 / np.e))
    assert [None if r is None else [(i, p.rank) for i, p in r.items()] for r in rows] == [
        [(1, 1), (0, 2)], None, [(21, 1)], [(31, 1), *((i, i + 2) for i in range(19))],
    ]  # fmt: skip
    for row, token_id in ((rows[0], 1), (rows[3], 31)):
        assert row is not None
        assert [p.logprob for p in row.values()] == pytest.approx([likely, *[likely - 1] * (len(row) - 1)])
        assert token_id in row
    assert handles[1].result().logprobs == (None,)


def test_a_failed_step_surfaces_and_later_ones_run(executor: CudaExecutor, step: Step) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    with pytest.raises(TapeoutError, match=r"token ids outside \[0, 300\)"):
        executor.submit(step((0, [VOCAB], 1, [1])))
    with pytest.raises(TapeoutError, match="or a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    assert ids_of(executor.submit(step((0, [30], 1, [1])))) == [31]


def test_a_new_request_does_not_see_the_last_id_of_its_slot(executor: CudaExecutor, step: Step) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [5], 0, [1]))).result()
    greedy(executor, 0)
    with pytest.raises(TapeoutError, match="a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    with pytest.raises(UsageError, match="slot 4 does not exist"):
        greedy(executor, 4)


def test_all_faults_of_a_step_are_listed(executor: CudaExecutor, step: Step) -> None:
    inputs = step((0, [1, 2], 0, [PAGES]))
    inputs = replace(inputs, row_ids=np.array([5], np.int32), positions=inputs.positions + 64)
    with pytest.raises(TapeoutError) as error:
        executor.submit(inputs)
    for part in ("positions outside [0, 64)", f"page ids outside [0, {PAGES})", "logit rows outside [0, 2)"):
        assert part in error.value.message
    with pytest.raises(TapeoutError, match=r"slots \[1\] for logit rows of slots \[0\]"):
        executor.submit(replace(step((0, [1], 0, [1])), row_slots=np.array([1], np.int32)))
    with pytest.raises(TapeoutError, match="a position at or above its sequence's cache length"):
        executor.submit(replace(step((0, [1], 3, [1])), positions=np.array([4], np.int32)))
    with pytest.raises(TapeoutError, match="17 token rows, expected 1 to 16"):
        executor.forward(step((0, [1] * 17, 0, [1, 2])))


@pytest.mark.parametrize("call", ["cuLaunchKernelEx", "cuGraphInstantiate", "cuGraphLaunch"])
def test_a_driver_error_is_told_and_leaves_nothing_half_done(
    executor: CudaExecutor, step: Step, cuda: FakeCuda, call: str
) -> None:
    greedy(executor, 0)
    cuda.fail = {call}
    with pytest.raises(TapeoutError, match=r"CUDA: .*CUDA_ERROR_LAUNCH_FAILED"):
        executor.submit(step((0, [5], 0, [1])))
    cuda.fail = set()
    assert cuda.open["graph"] == 0
    with pytest.raises(TapeoutError, match="a slot without one"):
        executor.submit(step((0, [FROM_SLOT], 1, [1])))
    assert ids_of(executor.submit(step((0, [5], 0, [1])))) == [6]


@pytest.mark.parametrize("launched", [False, True])
def test_an_interruption_leaves_host_and_device_at_one_turn(
    executor: CudaExecutor, step: Step, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, launched: bool
) -> None:
    """Ctrl-C is raised when the driver's call returns, and then the step is on its way, or it was before."""
    greedy(executor, 0)
    assert ids_of(executor.submit(step((0, [5], 0, [1])))) == [6]
    launch = cuda.cuGraphLaunch

    def interrupted(graph: int, stream: int) -> Any:
        if launched:
            launch(graph, stream)
        raise KeyboardInterrupt

    for queue in (executor.submit, executor.forward):
        monkeypatch.setattr(cuda, "cuGraphLaunch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue(step((0, [9], 1, [1])))
        monkeypatch.setattr(cuda, "cuGraphLaunch", launch)
        for i in range(5):
            assert ids_of(executor.submit(step((0, [20 + i], 1, [1])))) == [21 + i]


def test_an_error_of_the_device_surfaces_from_the_result(
    executor: CudaExecutor, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    handle = executor.submit(step((0, [5], 0, [1])))
    cuda.fail = {"cuEventSynchronize"}
    with pytest.raises(TapeoutError, match="waiting for a step"):
        handle.result()
    cuda.fail = set()
    with pytest.raises(TapeoutError, match="waiting for a step"):
        handle.result()


def test_any_thread_may_call(executor: CudaExecutor, step: Step) -> None:
    """Contexts belong to threads: the fixture fails when a call was made without one."""
    found: list[list[int]] = []

    def run() -> None:
        greedy(executor, 0)
        handles.append(executor.submit(step((0, [5], 0, [1]))))
        executor.forward(step((0, [FROM_SLOT], 1, [1])))

    handles: list[Any] = []
    for work in (run, lambda: found.append(ids_of(handles[0])), executor.close):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [[6]]


def test_closed_executor(executor: CudaExecutor, step: Step, cuda: FakeCuda) -> None:
    greedy(executor, 0)
    queued = executor.submit(step((0, [5], 0, [1])))
    executor.close()
    executor.close()
    assert not any(cuda.open.values())
    assert ids_of(queued) == [6]
    for call in (lambda: executor.forward(step((0, [5], 0, [1]))), lambda: greedy(executor, 0)):
        with pytest.raises(TapeoutError, match="closed"):
            call()


def test_requests_run_through_the_public_api(
    engine_path: Path, engine: Engine, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "tapeout")
    with LLM(str(engine_path), max_tokens_in_kv_cache=128) as llm:
        cuda.on_launch = NextToken(llm._executor, engine)  # type: ignore[arg-type]
        greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        params = [greedy, replace(greedy, repetition_penalty=1.01), greedy]
        prompts = [{"prompt_token_ids": ids} for ids in ([9, 10], [100], list(range(200, 221)))]
        outputs = llm.generate(prompts, params)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [list(range(n, n + 6)) for n in (11, 101, 221)]
    assert not any(cuda.open.values())


def test_a_step_runs_in_the_smallest_bucket_of_its_kind(executor: CudaExecutor) -> None:
    bucket = executor._replay.bucket  # (rows, sequences, logit rows); limits are 16 rows, 4 sequences
    assert bucket(1, 1, 1) == Bucket(1, 1, decode=True)
    assert bucket(3, 3, 3) == Bucket(4, 4, decode=True)
    assert bucket(3, 3, 0) == Bucket(4, 4, decode=True)  # chunks of one row, none of them a prompt's last
    assert bucket(3, 2, 2) == Bucket(4, 2, decode=False)
    assert bucket(9, 1, 0) == Bucket(16, 1, decode=False)
    assert bucket(16, 4, 4) == Bucket(16, 4, decode=False)


def test_steps_that_only_decode_have_launches_of_their_own(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    table = engine.launches
    assert table is not None
    greedy(executor, 0, 1)
    executor.submit(step((0, [1, 2, 3], 0, [0]), (1, [4], 0, [1]))).result()
    mixed = {launched.symbol for launched in cuda.launched}
    cuda.launched.clear()
    executor.submit(step((0, [FROM_SLOT], 3, [0]), (1, [FROM_SLOT], 1, [1]))).result()
    decode = {launched.symbol for launched in cuda.launched}
    assert list(table.decode_ranges) == [key for key in table.ranges if key.startswith("rope_attention")]
    assert "context" in mixed or "packed_context" in mixed
    assert not any("context" in symbol for symbol in decode)


def test_kernels_that_wait_by_themselves_may_start_early(
    executor: CudaExecutor, engine: Engine, step: Step, cuda: FakeCuda
) -> None:
    greedy(executor, 0)
    executor.submit(step((0, [1, 2, 3], 0, [0]))).result()
    assert engine.launches is not None
    overlap = {kernel.symbol: kernel.overlap for kernel in engine.launches.kernels}
    received, first, *others = cuda.launched
    # The step's numbers are read ahead of a kernel's turn: nothing begins before all of them are there.
    assert (received.symbol, received.overlap, first.overlap) == ("receive", False, False)
    assert all(launched.overlap == overlap[launched.symbol] for launched in others)
    assert all(launched.overlap for launched in others)  # SM 90: every kernel is one of ours
