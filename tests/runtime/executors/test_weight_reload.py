"""Other weights for a running engine: what runs, what is refused, and that nothing stale is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.plugins.errors import EngineError, EngineIncompatibleError, UsageError
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.executors.cpu.replay import Replay
from tapeout.runtime.kv_cache import EventKind
from tapeout.runtime.scheduler.record import PauseCause, StepRecord
from tapeout.runtime.stream import RequestStream

Weights = Mapping[str, np.ndarray]
Expected = Callable[[Weights, Sequence[int], int], list[int]]
WriteModel = Callable[..., Path]
PROMPT = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]  # three pages and a token
PAGE_BYTES = 2 * 2 * 2 * 4 * 8 * 4


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def begin(llm: LLM, count: int) -> RequestStream:
    """A request that has some of its tokens when this returns."""
    stream = llm.stream({"prompt_token_ids": PROMPT}, greedy(count))
    for _ in range(4):  # without text nothing is streamed before the end, so nobody else drives the loop
        llm._turn()
    return stream


def rest(stream: RequestStream) -> list[int]:
    return [i for delta in stream for i in delta.outputs[0].token_ids]


def answer(llm: LLM, ids: Sequence[int] = PROMPT, count: int = 6) -> tuple[list[int], int | None]:
    """Ids, and how many tokens of the prompt were cached."""
    (output,) = llm.generate({"prompt_token_ids": list(ids)}, greedy(count))
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.fixture(scope="module")
def other_weights(weights: Weights) -> Weights:
    """The same model after some training, as it were."""
    rng = np.random.default_rng(11)
    return {n: (a + rng.standard_normal(a.shape) * 0.4).astype(np.float32) for n, a in weights.items()}


@pytest.fixture(name="expected")
def expected_fixture(greedy_ids: Expected) -> Expected:
    return greedy_ids


@pytest.fixture
def other(write_model: WriteModel, other_weights: Weights) -> Path:
    return write_model("other.engine", values=other_weights)


@pytest.fixture
def llm(write_model: WriteModel) -> Iterator[LLM]:
    with LLM(write_model(), max_tokens_in_kv_cache=14 * 4, event_buffer_max_size=1000, threads=1) as llm:
        yield llm


def test_the_models_disagree(weights: Weights, other_weights: Weights, expected: Expected) -> None:
    """Else nothing below would show anything."""
    assert expected(weights, PROMPT, 6)[0] != expected(other_weights, PROMPT, 6)[0]


@pytest.mark.parametrize("host_pages", [0, 20])
def test_no_page_of_before_is_served(
    write_model: WriteModel,
    other: Path,
    weights: Weights,
    other_weights: Weights,
    host_pages: int,
    expected: Expected,
) -> None:
    options: dict[str, Any] = {"host_cache_bytes": host_pages * PAGE_BYTES, "max_tokens_in_kv_cache": 48}
    with LLM(write_model(), threads=1, event_buffer_max_size=1000, **options) as llm:
        old = expected(weights, PROMPT, 6)
        assert answer(llm) == (old, 0)
        assert answer(llm) == (old, 12)
        answer(llm, [1] * 30)  # in a pool of 12 pages, some of the prompt's go, or move to the host
        pin = llm.prefix_cache.pin([7] * 8)
        before = llm.prefix_cache.stats()
        assert (before.host_pages > 0) == bool(host_pages)
        llm.reload_weights(other)
        stats = llm.prefix_cache.stats()
        assert (stats.device_pages, stats.host_pages, stats.pinned_pages) == (0, 0, 0)
        new = expected(other_weights, PROMPT, 6)
        assert answer(llm) == (new, 0)
        assert answer(llm) == (new, 12)
        assert llm.engine.path == other
        llm.prefix_cache.unpin(pin)  # it ended, which is no error
        llm.reload_weights(llm.engine.path.with_name("model.engine"))
        assert answer(llm) == (old, 0)  # back to the first weights: their pages are gone all the same


def test_a_router_hears_that_pages_are_gone(llm: LLM, other: Path) -> None:
    answer(llm)
    stored = {e.page_hash for e in llm.prefix_cache.events() if e.kind is EventKind.STORED}
    assert stored
    llm.reload_weights(other)
    removed = {e.page_hash for e in llm.prefix_cache.events() if e.kind is EventKind.REMOVED}
    assert removed == stored
    answer(llm)
    again = {e.page_hash for e in llm.prefix_cache.events() if e.kind is EventKind.STORED} - stored
    assert len(again) == len(stored), "the same ids have other names under other weights"


def test_running_requests_finish_by_the_old_weights(
    llm: LLM, other: Path, weights: Weights, other_weights: Weights, expected: Expected
) -> None:
    stream = begin(llm, 12)
    waiting = [llm.stream({"prompt_token_ids": PROMPT}, greedy()) for _ in range(4)]
    llm.reload_weights(other)  # three slots: of the four, two run by the old weights
    assert rest(stream) == expected(weights, PROMPT, 12)
    texts = [rest(s) for s in waiting]
    old, new = expected(weights, PROMPT, 6), expected(other_weights, PROMPT, 6)
    assert all(t in (old, new) for t in texts)
    assert texts[-1] == new, "who waited runs by the new ones"


def test_running_requests_are_computed_again_by_the_new_weights(
    write_model: WriteModel, other: Path, weights: Weights, other_weights: Weights, expected: Expected
) -> None:
    records: list[StepRecord] = []
    with LLM(write_model(), threads=1, on_step=records.append) as llm:
        stream = begin(llm, 12)
        llm.reload_weights(other, running="recompute")
        ids = rest(stream)
        (pause,) = [p for r in records for p in r.paused]
        assert pause.cause is PauseCause.WEIGHTS
        assert "other weights" in pause.reason()
        said = pause.output_tokens  # planned, and read before the weights changed
        assert 0 < said < 12
        assert ids[:said] == expected(weights, PROMPT, said)
        assert ids[said:] == expected(other_weights, [*PROMPT, *ids[:said]], 12 - said)
        assert llm.stats().recomputed_tokens == len(PROMPT) + said - 1


def test_running_requests_are_ended(
    llm: LLM, other: Path, other_weights: Weights, expected: Expected
) -> None:
    stream = begin(llm, 20)
    llm.reload_weights(other, running="abort")
    *_, last = stream
    assert last.outputs[0].finish_reason == "abort"
    assert answer(llm) == (expected(other_weights, PROMPT, 6), 0)


def test_what_does_not_fit_is_named_and_changes_nothing(
    llm: LLM, write_model: WriteModel, other_weights: Weights, weights: Weights, program: Any
) -> None:
    old = answer(llm)[0]
    changed = replace(program, arena_bytes=program.arena_bytes + 64)
    for path, words in (
        (write_model("long.engine", values=other_weights, max_seq_len=44), "limits: "),
        (write_model("program.engine", values=other_weights, program=changed), "program: "),
        (write_model("kernels.engine", values=other_weights, kernels={"extra": b"x"}), "kernels: extra"),
        (write_model("cuda.engine", values=other_weights, target="cuda:sm_90"), "target: cuda:sm_90"),
    ):
        with pytest.raises(EngineIncompatibleError, match=words) as error:
            llm.reload_weights(path)
        assert error.value.hint
    with pytest.raises(UsageError, match="does not exist"):
        llm.reload_weights("nowhere.engine")
    with pytest.raises(UsageError, match="running = 'later', expected one of finish, recompute, abort"):
        llm.reload_weights(llm.engine.path, running="later")
    assert answer(llm) == (old, 12), "the cache is as it was"


def test_damaged_weights_are_refused(llm: LLM, other: Path, weights: Weights, expected: Expected) -> None:
    with LLM(other, threads=1) as whole:
        begin = whole.engine.weights["head"].begin
    data = bytearray(other.read_bytes())
    data[begin + 5] ^= 1
    other.write_bytes(data)
    with pytest.raises(EngineError, match=r"other\.engine"):
        llm.reload_weights(other)
    assert answer(llm)[0] == expected(weights, PROMPT, 6)


def test_a_failing_executor_leaves_the_old_weights(
    llm: LLM,
    other: Path,
    weights: Weights,
    other_weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
    expected: Expected,
) -> None:
    answer(llm)
    with monkeypatch.context() as patch:

        def fail(self: Replay) -> None:
            raise MemoryError("scripted")

        patch.setattr(Replay, "prepare_weights", fail)
        with pytest.raises(MemoryError):
            llm.reload_weights(other)
    assert llm.engine.path.name == "model.engine"
    assert answer(llm) == (expected(weights, PROMPT, 6), 0)
    llm.reload_weights(other)
    assert answer(llm) == (expected(other_weights, PROMPT, 6), 0)


def test_a_shared_weight_file_by_itself(
    write_model: WriteModel,
    weights: Weights,
    other_weights: Weights,
    caplog: pytest.LogCaptureFixture,
    expected: Expected,
) -> None:
    path = write_model("a/model.engine", shared=True)
    elsewhere = write_model("b/model.engine", values=other_weights, shared=True)
    (file,) = elsewhere.parent.glob("*.weights.safetensors")
    embedded = write_model("c.engine", values=other_weights)
    caplog.set_level(logging.INFO, "tapeout")
    with LLM(path, threads=1) as llm:
        assert answer(llm)[0] == expected(weights, PROMPT, 6)
        llm.reload_weights(file)
        assert answer(llm) == (expected(other_weights, PROMPT, 6), 0)
        assert llm.engine.files == (path, file)
        llm.reload_weights(path)
        assert answer(llm) == (expected(weights, PROMPT, 6), 0)
        llm.reload_weights(embedded)
        assert answer(llm) == (expected(other_weights, PROMPT, 6), 0)
    assert "run now" in caplog.text


def test_a_closed_llm(write_model: WriteModel, other: Path) -> None:
    llm = LLM(write_model(), threads=1)
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.reload_weights(other)
