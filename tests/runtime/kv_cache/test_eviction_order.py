"""What is evicted is what a slow and simple reading of the rule would evict, one page at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.runtime.kv_cache import (
    CacheUser,
    EventKind,
    KvCache,
    KvCacheRetentionConfig,
    PrefixCacheOptions,
    TokenRangeRetentionConfig,
)
from tapeout.runtime.kv_cache.radix_tree import PageNode

PER_PAGE = 2
#: Pages of a prompt, by one id each; short, so that many begin alike. Its priority; None says nothing.
REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.sampled_from([None, None, 10, 35, 60])),
    min_size=1,
    max_size=12,
)


def run(kv: KvCache, pages: list[int], priority: int | None) -> None:
    """A request that is computed at once and ends."""
    ids = np.repeat(np.array([*pages, 0], np.int32), PER_PAGE)
    config = None
    if priority is not None:
        config = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, priority, 50.0)])
    user = CacheUser(retention=config)
    asked = kv.ask(ids, user, len(pages) + 1, kv.num_free)
    kv.attach(0, ids, user, asked.match)
    kv.grow(np.array([0]), np.array([len(ids)]))
    kv.store(0, len(pages) * PER_PAGE, lambda start, end: ids[start:end], -1)
    kv.free(0)


@settings(deadline=None)
@given(requests=REQUESTS, batches=st.lists(st.integers(1, 9), min_size=1, max_size=6), lapse=st.booleans())
def test_one_page_at_a_time(
    requests: list[tuple[list[int], int | None]], batches: list[int], lapse: bool
) -> None:
    now = 0.0
    kv = KvCache(
        num_pages=80, tokens_per_page=PER_PAGE, num_slots=1, max_seq_len=32, clock=lambda: now,
        options=PrefixCacheOptions(event_buffer_max_size=10_000),
    )  # fmt: skip
    for pages, priority in requests:
        now += 0.01
        run(kv, pages, priority)
    now += 0.02 if lapse else 0.0
    left = {node.hash_by(kv._cache.tree.hash_of): node for node in kv._cache.tree.nodes()}
    # Before anything leaves: a page that has left knows neither its place nor its parent's children.
    parents = {name: node.parent for name, node in left.items()}

    def order(node: PageNode) -> tuple[int, int]:
        over = node.expires_at is not None and node.expires_at <= now
        return (35 if over else node.priority, node.last_used)

    orders = {name: order(node) for name, node in left.items()}
    kv._cache.allocate(kv.pool.num_blank)
    seen = kv.events.next_id
    for count in batches:
        kv._cache.allocate(min(count, kv.pool.num_free))
        for event in kv.events.since(seen):
            assert event.kind is EventKind.REMOVED
            leaves = [n for n, node in left.items() if all(parents[other] is not node for other in left)]
            assert event.page_hash in leaves, "the last page of a path goes before the others"
            assert orders[event.page_hash] == min(orders[n] for n in leaves)
            del left[event.page_hash]
        seen = kv.events.next_id
    assert len(left) == kv.stats().device_pages
