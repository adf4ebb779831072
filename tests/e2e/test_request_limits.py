"""Requests at the edges of what is allowed: lengths, page borders, stop strings, least and most tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import MAX_SEQ_LEN, PAGE, PAGE_BYTES, assert_nothing_is_held, ids

from tapeout.plugins.errors import UsageError
from tapeout.runtime import LLM, CompletionOutput, RequestOutput, SamplingParams

PROMPT = "the cat sat on the mat and"


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options)


@pytest.fixture(scope="module")
def tiny(tiny_engine: Path) -> Iterator[LLM]:
    with LLM(tiny_engine) as llm:
        yield llm


def one(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


# ---- lengths ----------------------------------------------------------------------------------


def test_at_least_one_token_is_asked_for(tiny: LLM) -> None:
    with pytest.raises(UsageError, match="max_tokens = 0, expected"):
        tiny.generate(PROMPT, greedy(0))
    whole = one(tiny.generate(PROMPT, greedy(4)))
    single = one(tiny.generate(PROMPT, greedy(1, logprobs=0)))
    assert (single.token_ids, single.finish_reason) == (whole.token_ids[:1], "length")
    assert single.logprobs is not None
    assert [list(row) for row in single.logprobs] == [list(single.token_ids)]
    (delta,) = tiny.stream(PROMPT, greedy(1))
    assert (delta.outputs[0].token_ids, delta.finished) == (single.token_ids, True)
    assert delta.outputs[0].text == single.text


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_reuse": False},
        {"chunk_tokens": PAGE},
        {"max_tokens_in_kv_cache": 12 * PAGE, "host_cache_bytes": 20 * PAGE_BYTES},
        {"max_tokens_in_kv_cache": 9 * PAGE, "capacity_policy": "max_utilization"},
    ],
)
def test_prompts_and_answers_that_end_with_a_page(tiny_engine: Path, options: dict[str, Any]) -> None:
    """One token less, as many, and one more; asked for twice, so that the second finds pages of the first."""
    prompts = [ids(7, n) for n in (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 1)]
    with LLM(tiny_engine, enable_prefix_reuse=False) as llm:
        answers = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy(2 * PAGE + 1))]
    with LLM(tiny_engine, **options) as llm:
        asked = [
            (prompt, answer, end * PAGE + more - len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
            for end in (1, 2, 3, 4)
            for more in (-1, 0, 1, 2)
            if 0 < end * PAGE + more - len(prompt) <= len(answer)
        ]
        for _ in range(2):
            outputs = llm.generate([p for p, _, _ in asked], [greedy(count) for _, _, count in asked])
            for output, (prompt, answer, count) in zip(outputs, asked, strict=True):
                got = output.outputs[0]
                assert got.token_ids == answer[:count], (len(prompt), count)
                assert got.finish_reason == "length"
        assert_nothing_is_held(llm)


def test_prompts_as_long_as_an_engine_takes(tiny: LLM) -> None:
    """They leave room for two tokens, for one, for none."""
    prompt = ids(3, MAX_SEQ_LEN - 2)
    first = one(tiny.generate(prompt, greedy(None)))
    assert (len(first.token_ids), first.finish_reason) == (2, "length")
    longest = [*prompt, first.token_ids[0]]
    for params in (greedy(None), greedy(1), greedy(7), greedy(7, min_tokens=1)):
        last = one(tiny.generate(longest, params))
        assert (last.token_ids, last.finish_reason) == (first.token_ids[1:], "length")
    assert [d.outputs[0].token_ids for d in tiny.stream(longest, greedy(5))] == [first.token_ids[1:]]
    steps = tiny.stats().steps
    with pytest.raises(UsageError, match="min_tokens = 2, but only 1 tokens can be generated"):
        tiny.generate(longest, greedy(7, min_tokens=2))
    for too_long in ([*prompt, *first.token_ids], [*prompt, *first.token_ids, 5]):
        message = f"it has {len(too_long)} tokens; max_seq_len = 512 allows at most 511"
        for call in (tiny.generate, tiny.stream):
            with pytest.raises(UsageError, match=message):
                call(too_long, greedy(1))
    assert tiny.stats().steps == steps


def test_a_refused_call_disturbs_nobody(tiny: LLM) -> None:
    prompts = [ids(seed, 20) for seed in range(3)]
    alone = [o.outputs[0].token_ids for o in tiny.generate(prompts, greedy(30))]
    streams = [tiny.stream(p, greedy(30)) for p in prompts]
    got = [list(next(s).outputs[0].token_ids) for s in streams]
    with pytest.raises(UsageError, match="prompt 1: it has 512 tokens") as error:
        tiny.generate([prompts[0], ids(9, MAX_SEQ_LEN), prompts[1]], greedy(5))
    assert "prompt 0" not in error.value.message
    assert tiny.stats().num_requests_running + tiny.stats().num_requests_waiting == 3
    for stream, its in zip(streams, got, strict=True):
        its += [i for delta in stream for i in delta.outputs[0].token_ids]
    assert [tuple(its) for its in got] == alone
    assert_nothing_is_held(tiny)


# ---- stop strings -----------------------------------------------------------------------------


#: Text that came at once, and how many ids there were by then: a character may take several.
Pieces = list[tuple[str, int]]


@pytest.fixture(scope="module")
def pieces(tiny: LLM) -> Pieces:
    params, made, count = greedy(60), [], 0
    for delta in tiny.stream(PROMPT, params):
        count += len(delta.outputs[0].token_ids)
        made.append((delta.outputs[0].text, count))
    assert "".join(text for text, _ in made) == one(tiny.generate(PROMPT, params)).text
    return made


def stops_across_tokens(made: Pieces) -> list[str]:
    """The end of a piece and the beginning of the next; an end, a whole one and a beginning."""
    pieces = [text for text, _ in made]
    whole = [a[-1] + b[0] for a, b in pairwise(pieces) if a and b]
    whole += [
        a[-1] + b + c[0] for a, b, c in zip(pieces, pieces[1:], pieces[2:], strict=False) if a and b and c
    ]
    return [stop for stop in dict.fromkeys(whole) if "\ufffd" not in stop]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_stop_strings_across_tokens(tiny: LLM, pieces: Pieces, include: bool, logprobs: int | None) -> None:
    """Whatever is cut from the text, ids are those computed until the stop string was complete, and every one
    of them has its row of log probabilities: in whole results and in streams."""
    full = one(tiny.generate(PROMPT, greedy(60, logprobs=logprobs)))
    stops = stops_across_tokens(pieces)
    assert len(stops) > 20
    params = [
        greedy(60, logprobs=logprobs, stop=(stop, "nowhere in it"), include_stop_str_in_output=include)
        for stop in stops
    ]
    for stop, output in zip(stops, tiny.generate([PROMPT] * len(stops), params), strict=True):
        got = output.outputs[0]
        end = full.text.index(stop) + len(stop)
        assert got.text == full.text[: end if include else end - len(stop)]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        check_kept(got, full, pieces, end)
    for stop, its in list(zip(stops, params, strict=True))[::7]:
        deltas = [delta.outputs[0] for delta in tiny.stream(PROMPT, its)]
        end = full.text.index(stop) + len(stop)
        assert "".join(d.text for d in deltas) == full.text[: end if include else end - len(stop)]
        assert all(d.logprobs is None or len(d.logprobs) == len(d.token_ids) for d in deltas)
        joined = CompletionOutput(
            index=0,
            text="",
            token_ids=tuple(i for d in deltas for i in d.token_ids),
            logprobs=None if logprobs is None else tuple(row for d in deltas for row in d.logprobs or ()),
            cumulative_logprob=None if logprobs is None else sum(d.cumulative_logprob or 0.0 for d in deltas),
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
        )
        check_kept(joined, full, pieces, end)


def check_kept(got: CompletionOutput, full: CompletionOutput, pieces: Pieces, end: int) -> None:
    """Ids up to the one with which the text has `end` characters, and what belongs to them."""
    lengths = accumulate(len(text) for text, _ in pieces)
    count = next(ids for (_, ids), length in zip(pieces, lengths, strict=True) if length >= end)
    assert got.token_ids == full.token_ids[:count]
    if full.logprobs is None:
        assert (got.logprobs, got.cumulative_logprob) == (None, None)
        return
    assert got.logprobs is not None
    assert [list(row) for row in got.logprobs] == [list(row) for row in full.logprobs[:count]]
    kept = [row[i].logprob for row, i in zip(got.logprobs, got.token_ids, strict=True)]
    wanted = [row[i].logprob for row, i in zip(full.logprobs, full.token_ids, strict=False)][:count]
    assert kept == pytest.approx(wanted, abs=1e-4)
    assert got.cumulative_logprob == pytest.approx(sum(kept))


# ---- least and most tokens --------------------------------------------------------------------


def test_as_many_tokens_as_are_asked_for_at_least_and_at_most(tiny: LLM, pieces: Pieces) -> None:
    """What would have ended it before has no effect, be it a string, an id or an EOS."""
    full = one(tiny.generate(PROMPT, greedy(24)))
    stop = next(text for text, _ in pieces[2:6] if text and "\ufffd" not in text)
    held = one(tiny.generate(PROMPT, greedy(24, min_tokens=24, stop=(stop,))))
    assert (held.token_ids, held.text, held.finish_reason) == (full.token_ids, full.text, "length")
    ending = tuple(dict.fromkeys(full.token_ids[:12]))
    masked = one(tiny.generate(PROMPT, greedy(24, min_tokens=24, stop_token_ids=ending, ignore_eos=False)))
    assert len(masked.token_ids) == 24
    eos = tiny.engine.manifest.tokenizer.eos_token_ids
    assert eos
    assert not set(masked.token_ids) & {*ending, *eos}, "not even the last one"
    assert masked.finish_reason == "length"
    single = one(tiny.generate(PROMPT, greedy(1, min_tokens=1, stop_token_ids=full.token_ids[:1])))
    assert (len(single.token_ids), single.finish_reason) == (1, "length")
    assert single.token_ids != full.token_ids[:1]
