"""The tiny engine as tests of requests know it: its limits, prompts for it, and what it holds when idle."""

from __future__ import annotations

import random

from tapeout.runtime import LLM

SLOTS, MAX_SEQ_LEN, PAGE, PAGE_BYTES = 4, 512, 16, 8_192


def ids(seed: int, count: int) -> list[int]:
    """Token ids of its vocabulary, none of them a special one."""
    return random.Random(seed).choices(range(5, 300), k=count)


def assert_nothing_is_held(llm: LLM) -> None:
    """Once its last steps have been read, no request has a slot or a page."""
    while llm._loop.step():
        pass
    stats = llm.stats()
    assert (stats.kv_pages_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert (llm._loop.capacity.num_free_slots, llm._loop.capacity.committed_pages) == (SLOTS, 0)
    assert llm._loop.kv_cache.retired_pages == 0
