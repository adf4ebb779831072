"""Streams that are left, in every state of their request and in every way: nothing stays, nobody notices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import PAGE_BYTES, SLOTS, assert_nothing_is_held, ids

from tapeout.runtime import LLM, RequestOutput, SamplingParams
from tapeout.runtime.stream import RequestStream

ANSWER = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def token_ids(deltas: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(i for delta in deltas for i in delta.outputs[0].token_ids)


# ---- ways to leave a stream, which is taken out of its box where the box is its last owner ----


def close(box: list[RequestStream]) -> None:
    box[0].close()
    box[0].close()
    assert list(box[0]) == []


def drop(box: list[RequestStream]) -> None:
    box.clear()


def collect(box: list[RequestStream]) -> None:
    cycle: list[Any] = [box.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def fail(box: list[RequestStream]) -> None:
    """The consumer's own error; `pytest.raises` would keep its frames, and so the stream."""

    def consume(stream: RequestStream) -> None:
        raise ZeroDivisionError

    try:
        consume(box.pop())
    except ZeroDivisionError:
        return


def close_a_generator(box: list[RequestStream]) -> None:
    """One around the stream, which may never have been started."""
    texts = (delta.outputs[0].text for delta in box.pop())
    texts.close()


WAYS = (close, drop, collect, fail, close_a_generator)


# ---- states to leave it in: prompt tokens and parameters, others that run, and how it is known -----


def waits(llm: LLM, stream: RequestStream) -> bool:
    request = llm._loop._waiting.get(stream.request_id)
    return request is not None and request.pauses == 0


def is_paused(llm: LLM, stream: RequestStream) -> bool:
    request = llm._loop._waiting.get(stream.request_id)
    return request is not None and request.pauses > 0


def numbers(llm: LLM, stream: RequestStream) -> tuple[int, int, int]:
    """Tokens in the cache, of the context, and read, of a request that runs."""
    running = llm._loop.running
    request = running.get(stream.request_id)
    if request is None:
        return 0, 0, 0
    slot = request.slot
    return (
        running.cached_tokens.item(slot),
        running.context_tokens.item(slot),
        running.output_tokens.item(slot),
    )


def has_read_some_context(llm: LLM, stream: RequestStream) -> bool:
    cached, context, _ = numbers(llm, stream)
    return 32 <= cached < context


def has_submitted_its_context(llm: LLM, stream: RequestStream) -> bool:
    cached, context, read = numbers(llm, stream)
    return cached >= context > 0 and read == 0


def generates(llm: LLM, stream: RequestStream) -> bool:
    return numbers(llm, stream)[2] >= 20


def has_finished(llm: LLM, stream: RequestStream) -> bool:
    return stream._collector.finished


PRESSED = {"capacity_policy": "max_utilization", "max_tokens_in_kv_cache": 256}
STATES: dict[str, tuple[int, SamplingParams, int, dict[str, Any], Callable[[LLM, RequestStream], bool]]] = {
    "waiting": (40, ANSWER, SLOTS, {}, waits),
    "chunked": (120, ANSWER, 2, {}, has_read_some_context),
    "context": (20, ANSWER, 2, {}, has_submitted_its_context),
    "generating": (40, ANSWER, 2, {}, generates),
    "paused": (40, ANSWER, 3, PRESSED, is_paused),
    "finished": (40, SHORT, 2, {}, has_finished),
}
CACHES: dict[str, dict[str, Any]] = {
    "no reuse": {"enable_prefix_reuse": False},
    "reuse": {},
    "host tier": {"max_tokens_in_kv_cache": 512, "host_cache_bytes": 30 * PAGE_BYTES},
}


@pytest.fixture(scope="module")
def alone(tiny_engine: Path) -> Iterator[Callable[[list[int], SamplingParams], tuple[int, ...]]]:
    """Answers of an LLM that has nothing else to do and keeps nothing."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    with LLM(tiny_engine, enable_prefix_reuse=False) as llm:

        def answer(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
            key = (*prompt, -1, params.max_tokens or 0)
            if key not in known:
                known[key] = llm.generate(prompt, params)[0].outputs[0].token_ids
            return known[key]

        yield answer


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("state", STATES)
def test_a_stream_can_be_left_at_any_time(tiny_engine: Path, alone: Any, state: str, cache: str) -> None:
    prompt_tokens, params, num_others, options, is_there = STATES[state]
    with LLM(tiny_engine, chunk_tokens=16, **(CACHES[cache] | options)) as llm:
        for seed, leave in enumerate(WAYS, 1):
            prompts = [ids(100 * seed + i, 40) for i in range(num_others)]
            prompt = ids(100 * seed + 50, prompt_tokens)
            others = [llm.stream(p, ANSWER) for p in prompts]
            box = [llm.stream(prompt, params)]
            name = box[0].request_id
            for _ in range(400):
                llm._turn()
                if is_there(llm, box[0]):
                    break
            assert is_there(llm, box[0]), "the test does not come to what it is to test"
            leave(box)
            llm._turn()
            assert llm._loop._waiting.get(name) is None
            assert llm._loop.running.get(name) is None
            for other, its_prompt in zip(others, prompts, strict=True):
                assert token_ids(list(other)) == alone(its_prompt, ANSWER), leave.__name__
            (again,) = llm.generate(prompt, params)
            assert again.outputs[0].token_ids == alone(prompt, params), leave.__name__
            assert_nothing_is_held(llm)
        if cache == "host tier" and state != "finished":
            assert llm.prefix_cache.stats().offloaded_pages > 0


def test_a_consumer_that_breaks_off_between_two_deltas(tiny_engine: Path, alone: Any) -> None:
    """By `break`, and by an error that passes through a generator around the stream."""
    prompt, other_prompt = ids(1, 30), ids(2, 30)

    def texts(stream: RequestStream) -> Iterator[str]:
        for delta in stream:
            yield delta.outputs[0].text

    def fail_at_the_third(stream: RequestStream) -> None:
        for count, _ in enumerate(texts(stream), 1):
            if count == 3:
                raise ZeroDivisionError

    with LLM(tiny_engine) as llm:
        other = llm.stream(other_prompt, ANSWER)
        for _ in llm.stream(prompt, ANSWER):
            break
        try:
            fail_at_the_third(llm.stream(prompt, ANSWER))
        except ZeroDivisionError:
            pass
        else:
            pytest.fail("it has more than three deltas")
        llm._turn()
        assert llm.stats().num_requests_running == 1
        assert token_ids(list(other)) == alone(other_prompt, ANSWER)
        assert_nothing_is_held(llm)


def test_streams_that_are_dropped_together_end_with_the_next_turn(tiny_engine: Path) -> None:
    """A finalizer may run in the midst of a turn, so it ends nothing itself; some have finished by then."""
    with LLM(tiny_engine) as llm:
        streams = [llm.stream(ids(i, 20), SHORT if i % 3 == 0 else ANSWER) for i in range(12)]
        kept = streams[5]
        for _ in range(10):
            llm._turn()
        before = llm.stats()
        del streams
        gc.collect()
        assert llm.stats() == before
        assert len(token_ids(list(kept))) == ANSWER.max_tokens
        assert_nothing_is_held(llm)
