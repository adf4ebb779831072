"""The tensors of a made-up step: counts, lengths, positions and a shuffled page table.

The builder and the GPU machine make the same ones. Rows beyond the counts are stale on purpose.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from tapeout.plugins.cuda import MAX_KV_HEADS
from tapeout.plugins.tactic_check.hashed import permutation
from tapeout.runtime.kv_cache import pages_for
from tapeout.runtime.tactic_timer.pack import StepCase

STALE = 1 << 30
ONE_PAGE = 1 << 30  # tokens of a page where an op has no cache: one page a sequence
SPARE_PAGES = 3  # of the pool: nobody's
_STALE_ROWS = 16


def num_pages(case: StepCase, tokens_per_page: int) -> int:
    """Pages of a pool that holds the step."""
    return sum(pages_for(kv, tokens_per_page) for _, kv in case.sequences) + SPARE_PAGES


def step_tensors(case: StepCase, tokens_per_page: int, bucket: int) -> dict[str, np.ndarray]:
    """int32 step tensors by name, with stale elements behind the real ones.

    bucket: padded rows; arrays over rows have at least as many.
    """
    queries = [q for q, _ in case.sequences]
    lengths = [kv for _, kv in case.sequences]
    ends = list(accumulate(queries))
    order, used = permutation(len(queries), num_pages(case, tokens_per_page)), 0
    table = np.full((len(queries), case.max_pages), -1, np.int32)
    for index, kv in enumerate(lengths):
        count = pages_for(kv, tokens_per_page)
        table[index, :count] = order[used : used + count]
        used += count
    positions = [np.arange(kv - q, kv) for q, kv in case.sequences]
    counts = [case.rows, len(queries), max(queries), max(lengths), case.logit_rows]
    padding = max(0, bucket - case.rows) + _STALE_ROWS
    stale = np.full(padding, STALE)

    def array(*parts: object) -> np.ndarray:
        return np.concatenate([np.asarray(p, np.int32).reshape(-1) for p in parts])

    return {
        "counts": array(counts),
        "cu_q": array([0, *ends], stale),
        "kv_lens": array(lengths, stale),
        "positions": array(*positions, stale),
        "row_seqs": array(np.repeat(np.arange(len(queries)), queries), stale),
        "row_ids": array([end - 1 for end in ends], stale),
        "token_ids": array(np.zeros(case.rows), stale),
        "page_table": table,
        "arrivals": np.zeros(len(queries) * MAX_KV_HEADS, np.int32),
    }


def used_tokens(case: StepCase, tokens_per_page: int, table: np.ndarray) -> np.ndarray:
    """int32 [pages]: tokens each page holds before the step."""
    used = np.zeros(num_pages(case, tokens_per_page), np.int32)
    for (q, kv), pages in zip(case.sequences, table, strict=True):
        for index in range(pages_for(kv - q, tokens_per_page)):
            used[pages[index]] = min(tokens_per_page, kv - q - index * tokens_per_page)
    return used
