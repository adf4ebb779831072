"""`LLM` over real engines: results, metrics, threads, aborting, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapeout.plugins.errors import UsageError
from tapeout.runtime import LLM, RequestOutput, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


def check_metrics(output: RequestOutput, started: float) -> None:
    m = output.metrics
    assert m.admitted_time is not None
    assert m.first_token_time is not None
    assert m.finish_time is not None
    assert started - 0.1 <= m.arrival_time <= m.admitted_time <= m.first_token_time <= m.finish_time
    assert m.finish_time <= time.time() + 0.1
    assert m.queue_seconds == pytest.approx(m.admitted_time - m.arrival_time, abs=1e-4)
    assert m.prefill_seconds == pytest.approx(m.first_token_time - m.admitted_time, abs=1e-4)
    assert m.decode_seconds == pytest.approx(m.finish_time - m.first_token_time, abs=1e-4)
    assert m.prompt_tokens == len(output.prompt_token_ids)
    assert m.output_tokens == len(output.outputs[0].token_ids)


def test_smollm2_answers_as_its_chat_template_asks(llm: LLM) -> None:
    started = time.time()
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}])
    completion = output.outputs[0]
    assert "Paris" in completion.text
    assert "<|im_end|>" not in completion.text
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "stop", None)
    assert completion.token_ids[-1] == 2  # <|im_end|>
    assert output.prompt is not None
    assert output.prompt.startswith("<|im_start|>system\n")
    assert output.prompt.endswith("<|im_start|>assistant\n")
    assert output.finished
    check_metrics(output, started)


def test_a_stream_is_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    whole = llm.generate("Emoji: 😀 😃 😄", params)[0].outputs[0]
    deltas = list(llm.stream("Emoji: 😀 😃 😄", params))
    assert "".join(d.outputs[0].text for d in deltas) == whole.text
    assert tuple(i for d in deltas for i in d.outputs[0].token_ids) == whole.token_ids
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert not any("\ufffd" in d.outputs[0].text for d in deltas[:-1])
    assert whole.logprobs is not None
    assert whole.cumulative_logprob == pytest.approx(
        sum(row[i].logprob for row, i in zip(whole.logprobs, whole.token_ids, strict=True)), abs=1e-4
    )


def test_every_prompt_has_its_own_parameters(tiny: LLM) -> None:
    started = time.time()
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=2.0, max_tokens=9, ignore_eos=True, seed=5),
        SamplingParams(temperature=2.0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, repetition_penalty=1.8),
    ]
    together = tiny.generate(["the cat"] * 5, params)
    assert [len(o.outputs[0].token_ids) for o in together] == [3, 40, 9, 9, 10]
    assert [o.outputs[0].finish_reason for o in together] == ["length"] * 5
    assert [o.outputs[0].logprobs is not None for o in together] == [False, True, False, False, False]
    assert [o.seed is not None for o in together] == [False, False, True, True, False]
    assert len({o.request_id for o in together}) == 5
    for output, own in zip(together, params, strict=True):
        check_metrics(output, started)
        alone = tiny.generate(
            "the cat", own if own.greedy else SamplingParams(**{**vars(own), "seed": output.seed})
        )
        assert alone[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_max_tokens_none_fills_the_engines_length(tiny: LLM) -> None:
    (output,) = tiny.generate("the cat", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 512
    assert output.outputs[0].finish_reason == "length"


def test_more_tokens_than_fit_end_at_the_limit(tiny: LLM) -> None:
    prompt = [5] * 500
    (output,) = tiny.generate({"prompt_token_ids": prompt}, LONG)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (12, "length")


def test_abort_ends_a_request_from_another_thread(tiny: LLM) -> None:
    stream = tiny.stream("the cat", LONG)
    other = tiny.stream("the dog", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    aborter = threading.Thread(target=tiny.abort, args=(stream.request_id,))
    aborter.start()
    aborter.join()
    rest = list(stream)
    assert rest[-1].outputs[0].finish_reason == "abort"
    assert not tiny.abort(stream.request_id)
    assert sum(len(d.outputs[0].token_ids) for d in other) == 8
    settle(tiny)


def settle(llm: LLM) -> None:
    """Read what is in flight; afterwards nothing may be held."""
    llm.generate("the", SamplingParams(temperature=0, max_tokens=1))
    stats = llm.stats()
    assert (stats.kv_pages_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)


def test_a_stream_that_is_dropped_frees_its_pages(tiny: LLM) -> None:
    for _ in range(6):
        stream = tiny.stream("the cat", LONG)
        next(stream)
        del stream
    settle(tiny)


def test_many_threads_share_one_llm(tiny: LLM) -> None:
    prompts = [
        f"the {word} sat on" for word in ("cat", "dog", "mat", "token", "engine", "garden", "end", "run")
    ]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = {p: tiny.generate(p, params)[0].outputs[0].token_ids for p in prompts}
    found: dict[str, list[tuple[int, ...]]] = {p: [] for p in prompts}

    def ask(prompt: str) -> None:
        for turn in range(4):
            if turn % 2:
                found[prompt].append(tiny.generate(prompt, params)[0].outputs[0].token_ids)
            else:
                deltas = tiny.stream(prompt, params)
                found[prompt].append(tuple(i for d in deltas for i in d.outputs[0].token_ids))

    before = tiny.stats().steps
    threads = [threading.Thread(target=ask, args=(p,)) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {p: [ids] * 4 for p, ids in expected.items()}
    # one after the other they would need a step for each of 8 x 4 x 30 tokens
    assert tiny.stats().steps - before < 8 * 4 * 30 / 2
    settle(tiny)


def test_bad_requests_among_good_ones_run_nothing(tiny: LLM) -> None:
    steps = tiny.stats().steps
    with pytest.raises(UsageError) as error:
        tiny.generate(["fine", "", [300], [5] * 600], SamplingParams(max_tokens=4))
    for part in ("prompt 1: it is empty", "prompt 2: token ids 300", "prompt 3: it has 600 tokens"):
        assert part in error.value.message
    assert tiny.stats().steps == steps


def test_two_llms_of_one_engine_do_not_meet(tiny: LLM, tiny_engine: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(tiny_engine, kv_cache_bytes=1 << 20, threads=1) as second:
        first_stream, second_stream = tiny.stream("the cat", params), second.stream("the cat", params)
        pairs = list(zip(first_stream, second_stream, strict=True))
        assert [a.outputs[0].token_ids for a, _ in pairs] == [b.outputs[0].token_ids for _, b in pairs]
    assert len(tiny.generate("the cat", params)[0].outputs[0].token_ids) == 12


def test_closing_ends_what_runs(tiny_engine: Path) -> None:
    llm = LLM(tiny_engine)
    stream = llm.stream("the cat", LONG)
    next(stream)
    llm.close()
    llm.close()
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    with pytest.raises(UsageError, match="closed"):
        llm.generate("the cat", LONG)
