"""A real model under pressure: whatever is paused, resumed and cut into chunks, the answers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapeout.runtime import LLM, SamplingParams

PROMPT_TOKENS = (3, 40, 11, 70, 1, 25, 90, 18)
OUTPUT_TOKENS = (60, 30, 50, 20, 64, 40, 25, 55)
#: What a request has seen and sampled matters to these, so it has to survive a pause.
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 0.8, "top_k": 40, "seed": 5},
    {"temperature": 0, "min_tokens": 15, "ignore_eos": False, "stop_token_ids": tuple(range(40, 120))},
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(5, 290, count).tolist() for count in PROMPT_TOKENS]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": most, "ignore_eos": True} | STYLES[i % len(STYLES)])
        for i, most in enumerate(OUTPUT_TOKENS)
    ]


@pytest.fixture(scope="module")
def alone(tiny_engine: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Every answer, one request at a time and whole prompts at once."""
    with LLM(tiny_engine) as llm:
        return [
            llm.generate({"prompt_token_ids": ids}, p)[0].outputs[0].token_ids
            for ids, p in zip(prompts, params(), strict=True)
        ]


@pytest.mark.parametrize("chunking", ["first_come_first_served", "equal_progress", "force_chunk"])
@pytest.mark.parametrize("chunk_tokens", [None, 7, 48])
def test_pausing_and_chunking_change_no_token(
    tiny_engine: Path,
    prompts: list[list[int]],
    alone: list[tuple[int, ...]],
    chunking: str,
    chunk_tokens: int | None,
) -> None:
    with LLM(
        tiny_engine,
        capacity_policy="max_utilization",
        chunking_policy=chunking,
        chunk_tokens=chunk_tokens,
        max_tokens_in_kv_cache=144,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params())
        stats = llm.stats()
    assert [o.outputs[0].token_ids for o in outputs] == alone
    assert stats.pauses > 0
    assert stats.recomputed_tokens > 0
    assert stats.kv_pages_total < 10


def test_the_other_policies_change_no_token_either(
    tiny_engine: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    for policy in ("guaranteed_no_evict", "static_batch"):
        with LLM(tiny_engine, capacity_policy=policy, max_tokens_in_kv_cache=144) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params())
            assert llm.stats().pauses == 0
        assert [o.outputs[0].token_ids for o in outputs] == alone


@pytest.mark.parametrize("host_cache_bytes", [None, 0, 1 << 24])
def test_what_is_still_cached_is_not_computed_again(
    tiny_engine: Path, prompts: list[list[int]], alone: list[tuple[int, ...]], host_cache_bytes: int | None
) -> None:
    """None: without prefix reuse, where all that was computed is computed again."""
    with LLM(
        tiny_engine,
        capacity_policy="max_utilization",
        max_tokens_in_kv_cache=144,
        enable_prefix_reuse=host_cache_bytes is not None,
        host_cache_bytes=host_cache_bytes or 0,
        on_step=(records := []).append,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params())
        assert [o.outputs[0].token_ids for o in outputs] == alone
        resumed = [a for r in records for a in r.admitted if a.resumed]
        assert len(resumed) == llm.stats().pauses > 0
    cached = sum(a.cached_tokens for a in resumed)
    if host_cache_bytes is None:
        assert cached == 0
        assert all(a.recompute_tokens > 0 for a in resumed)
    else:
        assert cached > 0
    if host_cache_bytes:  # nothing is lost but a page that was not full
        assert all(a.recompute_tokens < 16 for a in resumed)


def test_a_paused_request_streams_on(
    tiny_engine: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    with LLM(tiny_engine, capacity_policy="max_utilization", max_tokens_in_kv_cache=144) as llm:
        streams = [llm.stream({"prompt_token_ids": ids}, p) for ids, p in zip(prompts, params(), strict=True)]
        got = [tuple(i for delta in stream for i in delta.outputs[0].token_ids) for stream in streams]
        assert llm.stats().pauses > 0
    assert got == alone
