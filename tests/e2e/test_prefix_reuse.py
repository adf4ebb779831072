"""Prefix reuse on a real engine: ids are those of a run without it, whatever is shared, copied or moved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_llm import PAGE, ids

from tapeout.plugins.errors import UsageError
from tapeout.runtime import LLM, KvCacheRetentionConfig, SamplingParams, TokenRangeRetentionConfig
from tapeout.runtime.bench.measured_llm import BenchRequest, MeasuredLLM
from tapeout.runtime.kv_cache import EventKind, Tier

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def answers(llm: LLM, prompts: Sequence[list[int]], **options: Any) -> list[tuple[int, ...]]:
    return [o.outputs[0].token_ids for o in llm.generate(list(prompts), GREEDY, **options)]


@pytest.fixture(scope="module")
def conversations() -> list[list[int]]:
    """A system prompt with six questions, one of which is asked twice; and two unlike them."""
    system = ids(0, 75)
    questions = [system + ids(i, 10 + 9 * i) for i in range(1, 7)]
    return [*questions, questions[2], ids(20, 64), ids(21, 40)]


@pytest.fixture(scope="module")
def expected(tiny_engine: Path, conversations: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """Answers without reuse: to each prompt, and to each prompt with its answer and 21 more ids."""
    with LLM(tiny_engine, enable_prefix_reuse=False) as llm:
        first = answers(llm, conversations)
        second = answers(llm, following(conversations, first))
        assert llm.prefix_cache.stats().cached_tokens == llm.prefix_cache.stats().device_pages == 0
    return [first, second]


def following(prompts: list[list[int]], given: list[tuple[int, ...]]) -> list[list[int]]:
    return [[*p, *a, *ids(50 + i, 21)] for i, (p, a) in enumerate(zip(prompts, given, strict=True))]


@pytest.mark.parametrize(
    ("tokens", "host_pages", "chunk_tokens", "policy"),
    [
        (None, 0, None, None),
        (480, 0, 16, None),
        (320, 40, None, None),
        (320, 6, 50, None),
        (320, 0, 16, "max_utilization"),
        (320, 40, None, "max_utilization"),
        (320, 6, 50, "static_batch"),
    ],
)
def test_greedy_ids_do_not_depend_on_reuse(
    tiny_engine: Path, conversations: list[list[int]], expected: list[list[tuple[int, ...]]],
    tokens: int | None, host_pages: int, chunk_tokens: int | None, policy: str | None,
) -> None:  # fmt: skip
    with LLM(tiny_engine) as llm:
        page_bytes = llm.engine.manifest.kv_cache.page_bytes(PAGE)
    with LLM(
        tiny_engine, max_tokens_in_kv_cache=tokens, host_cache_bytes=host_pages * page_bytes,
        chunk_tokens=chunk_tokens, capacity_policy=policy,
    ) as llm:  # fmt: skip
        for _ in range(2):
            assert answers(llm, conversations) == expected[0]
            assert answers(llm, following(conversations, expected[0])) == expected[1]
        one_by_one = [answers(llm, [prompt])[0] for prompt in conversations]
        assert one_by_one == expected[0]
        stats = llm.prefix_cache.stats()
        assert llm.stats().kv_pages_used == 0
        assert bool(llm.stats().pauses) == (policy == "max_utilization")
    assert min(stats.hit_pages, stats.partial_copies, stats.cached_tokens) > 0
    assert bool(stats.evicted_pages) == (tokens is not None)
    assert bool(stats.offloaded_pages) == bool(stats.onboarded_pages) == bool(host_pages)


def test_what_is_reused_is_told(tiny_engine: Path) -> None:
    prompt = ids(1, 80)  # five pages
    with LLM(tiny_engine, event_buffer_max_size=100) as llm:
        (first,) = llm.generate([prompt], ONE)
        again, longer = llm.generate([prompt, prompt[:70] + ids(2, 9)], ONE)
        # The last token is always computed; of the fifth page a copy is used.
        assert [o.num_cached_tokens for o in (first, again, longer)] == [0, 79, 70]
        assert llm.generate([prompt], ONE, cache_salt="mine")[0].num_cached_tokens == 0
        own = {"prompt_token_ids": prompt, "cache_salt": "mine"}
        assert llm.generate(own, ONE, cache_salt="not this one")[0].num_cached_tokens == 79
        *_, last = llm.stream(prompt, ONE)
        assert last.num_cached_tokens == 79
        events = llm.prefix_cache.events()
        assert [e.event_id for e in events] == list(range(len(events)))
        assert [(e.kind, e.tier, e.token_ids) for e in events[:5]] == [
            (EventKind.STORED, Tier.DEVICE, tuple(prompt[i : i + PAGE])) for i in range(0, 80, PAGE)
        ]
        assert [e.parent_hash for e in events[1:5]] == [e.page_hash for e in events[:4]]
        assert llm.prefix_cache.clear(cache_salt="mine") == 5
        assert [e.kind for e in llm.prefix_cache.events(len(events))] == [EventKind.REMOVED] * 5
        assert llm.generate([prompt], ONE)[0].num_cached_tokens == 79
        assert llm.prefix_cache.clear() == 5
        assert llm.generate([prompt], ONE)[0].num_cached_tokens == 0
        stats = llm.prefix_cache.stats()
    assert (stats.requests, stats.cached_tokens, stats.removed_pages) == (8, 4 * 79 + 70, 10)


def test_a_trace_tells_what_was_found(tiny_engine: Path, tmp_path: Path) -> None:
    prompt, trace = ids(1, 80), tmp_path / "trace.jsonl"
    with LLM(tiny_engine, trace=trace) as llm:
        for _ in range(2):
            llm.generate([prompt], ONE)
    steps = [event for event in map(json.loads, trace.read_text().splitlines()) if event["event"] == "step"]
    first, again = (admitted for step in steps for admitted in step.get("admitted", ()))
    assert "cached" not in json.dumps(first)
    assert again["cached_tokens"] == 79
    assert again["reason"].endswith("; 79 tokens are cached")
    assert [row["start"] for step in steps for row in step.get("context", ())] == [
        0,
        64,  # the engine's max_num_tokens
        79,
    ]


def test_what_is_worth_more_stays_longer(tiny_engine: Path) -> None:
    """Ten pages: three prompts of four pages do not fit together."""
    kept = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 90)])
    first, second, third = (ids(i, 4 * PAGE) for i in (1, 2, 3))
    with LLM(tiny_engine, max_tokens_in_kv_cache=10 * PAGE) as llm:
        llm.generate([first], ONE, kv_cache_retention_config=kept)
        for prompt in (second, third, second, third):
            llm.generate([prompt], ONE)
        assert llm.generate([first], ONE)[0].num_cached_tokens == 4 * PAGE - 1
    with LLM(tiny_engine, max_tokens_in_kv_cache=10 * PAGE) as llm:
        for prompt in (first, second, third, second, third):
            llm.generate([prompt], ONE)
        assert llm.generate([first], ONE)[0].num_cached_tokens <= PAGE


def test_a_pinned_prefix_stays(tiny_engine: Path) -> None:
    with LLM(tiny_engine, max_tokens_in_kv_cache=36 * PAGE) as llm:
        prefix = ids(1, 3 * PAGE + 5)
        pin = llm.prefix_cache.pin({"prompt_token_ids": prefix})
        assert (pin.num_tokens, llm.prefix_cache.stats().pinned_pages) == (3 * PAGE, 3)
        for i in range(2, 12):
            llm.generate([ids(i, 5 * PAGE)], GREEDY)
        assert llm.prefix_cache.stats().evicted_pages > 0
        assert llm.generate([prefix], ONE)[0].num_cached_tokens == 3 * PAGE
        with pytest.raises(UsageError, match="leaves too few of the pool's 36"):
            llm.prefix_cache.pin(ids(30, 5 * PAGE))  # the longest request takes 32
        llm.prefix_cache.unpin(pin)
        llm.prefix_cache.unpin(pin)
        for i in range(2, 12):
            llm.generate([ids(i, 5 * PAGE)], GREEDY)
        assert llm.generate([prefix], ONE)[0].num_cached_tokens == 0
        with pytest.raises(UsageError, match="0 of the prefix's 3 tokens are cached"):
            llm.prefix_cache.pin([5, 6, 7])


def test_bad_options_are_refused(tiny_engine: Path) -> None:
    for options, text in (
        ({"enable_prefix_reuse": 1}, "enable_prefix_reuse = 1, expected True or False"),
        ({"host_cache_bytes": -1}, "host_cache_bytes = -1, expected an integer of at least 0"),
        ({"host_cache_bytes": 5}, "host_cache_bytes = 5, expected 0 or at least one page of"),
        ({"host_cache_bytes": 1 << 20, "enable_prefix_reuse": False}, "without enable_prefix_reuse"),
    ):
        with pytest.raises(UsageError, match=text):
            LLM(tiny_engine, **options)
    with LLM(tiny_engine) as llm:
        bad = {"token_range_retention_configs": [{"token_start": 4, "token_end": 4, "priority": 101}]}
        with pytest.raises(UsageError) as error:
            llm.generate({"prompt": "the", "cache_salt": "", "kv_cache_retention_config": bad}, ONE)
        for text in (
            "cache_salt = ''",
            "token_end = 4, expected an integer above",
            "priority = 101, expected",
        ):
            assert text in error.value.message
        with pytest.raises(UsageError, match="unknown field 'priority'"):
            llm.generate("the", ONE, kv_cache_retention_config={"priority": 3})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="lacks token_start"):
            KvCacheRetentionConfig.of({"token_range_retention_configs": [{}]})


def test_the_command_line_reuses_and_tells(tiny_engine: Path, tmp_path: Path, invoke: Any) -> None:
    prompt = ids(1, 4 * PAGE)
    lines = [
        {"prompt_token_ids": prompt, "max_tokens": 1},
        {"prompt_token_ids": prompt, "max_tokens": 1, "cache_salt": "a"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines * 4)))

    def cached(*flags: str) -> list[int]:
        result = invoke("run", tiny_engine, "--input", source, "--json", "--max-batch-size", "1", *flags)
        assert result.exit_code == 0, result.stderr
        found = [json.loads(line)["usage"] for line in result.stdout.splitlines()]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]

    assert cached("--host-cache-bytes", "1000000") == [0, 0, *[4 * PAGE - 1] * 6]
    assert cached("--no-prefix-reuse") == [0] * 8
    source.write_text(json.dumps({"prompt": "x", "cache_salt": 3, "kv_cache_retention_config": 5}))
    result = invoke("run", tiny_engine, "--input", source)
    assert result.exit_code == 2
    assert "cache_salt = 3, expected text" in result.stderr
    assert "kv_cache_retention_config = 5, expected" in result.stderr


def test_flags_say_it_for_all_requests(tiny_engine: Path, tmp_path: Path, invoke: Any) -> None:
    """A salt and retention by flag; a line's own win. The pool holds two prompts."""
    kept, other = ids(1, 4 * PAGE), ids(2, 4 * PAGE)
    source, trace = tmp_path / "in.jsonl", tmp_path / "trace.jsonl"
    common = ("--input", source, "--json", "--max-batch-size", "1", "--kv-cache-tokens", 11 * PAGE)

    def cached(lines: list[dict[str, Any]], *flags: str) -> list[int]:
        source.write_text("\n".join(json.dumps({"max_tokens": 1, **line}) for line in lines))
        result = invoke("run", tiny_engine, *common, "--trace", trace, *flags)
        assert result.exit_code == 0, result.stderr
        found = [json.loads(line)["usage"] for line in result.stdout.splitlines()]
        return [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]

    first, second = {"prompt_token_ids": kept}, {"prompt_token_ids": kept, "cache_salt": "b"}
    salt = ("--cache-salt", "a")
    assert cached([first, second, first | {"cache_salt": "a"}, second], *salt) == [
        0,
        0,
        4 * PAGE - 1,
        4 * PAGE - 1,
    ]

    # The first prompt's pages would be the oldest; what the flag or its line says keeps or gives them up.
    rest = [{"prompt_token_ids": ids(n, 4 * PAGE)} for n in (3, 4)]
    high = json.dumps({"token_range_retention_configs": [{"token_start": 0, "priority": 90}]})
    middling = {"kv_cache_retention_config": json.loads(high.replace("90", "60"))}
    workload = [first, {"prompt_token_ids": other} | middling, *(line | middling for line in rest), first]
    flag = ("--kv-cache-retention-config", high)
    assert cached(workload)[-1] < 4 * PAGE - 1
    assert cached(workload, *flag)[-1] == 4 * PAGE - 1
    explained = invoke("explain", trace, "--steps", "0-999").stdout
    assert ": 1: evicted: " in explained
    assert ": 0: evicted: " not in explained
    for flags, words in (
        (("--cache-salt", ""), "cache_salt = '', expected text"),
        (("--kv-cache-retention-config", "{"), "is not JSON"),
        (("--kv-cache-retention-config", "[1]"), "is no JSON object"),
        (("--kv-cache-retention-config", '{"decode_retention_priority": 101}'), "an integer in [0, 100]"),
    ):
        result = invoke("run", tiny_engine, *common, *flags)
        assert result.exit_code == 2, result.stderr
        assert words in result.stderr


def test_a_benchmark_computes_every_prompt(tiny_engine: Path) -> None:
    request = BenchRequest(np.array(ids(1, 64), np.int32), 3)
    with MeasuredLLM(tiny_engine) as llm:
        for _ in range(2):
            llm.run([request])
        assert llm.stats().prompt_tokens == 128
