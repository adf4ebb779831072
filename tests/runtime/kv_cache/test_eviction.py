"""Which page goes first, what retention says about it, and what that costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import UsageError
from tapeout.runtime.kv_cache import (
    CacheUser,
    EventKind,
    KvCache,
    KvCacheRetentionConfig,
    PrefixCacheOptions,
    Tier,
    TokenRangeRetentionConfig,
)
from tapeout.runtime.kv_cache.eviction import EvictionQueue
from tapeout.runtime.kv_cache.radix_tree import Namespace, PageNode
from tapeout.runtime.kv_cache.retention import DEFAULT_PRIORITY, Retention

PER_PAGE = 4


class Cache:
    """A KvCache whose requests are computed at once."""

    def __init__(self, num_pages: int, host_pages: int = 0, events: int = 0) -> None:
        self.now = 0.0
        self.kv = KvCache(
            num_pages=num_pages, tokens_per_page=PER_PAGE, num_slots=4, max_seq_len=64, host_pages=host_pages,
            options=PrefixCacheOptions(event_buffer_max_size=events), clock=lambda: self.now,
        )  # fmt: skip

    def run(self, ids: list[int], output: int = 0, retention: KvCacheRetentionConfig | None = None) -> int:
        """A prompt and `output` more tokens; returns how many were cached."""
        array, user = np.array(ids, np.int32), CacheUser(retention=retention)
        worst = self.kv.pages_for(len(ids) + output + 1)
        asked = self.kv.ask(array, user, worst, self.kv.uncommitted_pages(0))
        assert asked.fits
        stats = self.kv.attach(0, array, user, asked.match)
        self.kv.grow(np.array([0]), np.array([len(ids) + output]))
        known = np.array([*ids, *[9] * output], np.int32)
        self.kv.store(0, len(known), lambda start, end: known[start:end], -1)
        self.kv.free(0)
        return stats.cached_tokens

    def cached(self, ids: list[int]) -> int:
        """Full pages of a prompt that are cached, without using them."""
        match = self.kv.ask(np.array([*ids, 0], np.int32), CacheUser(), 1, 0).match
        return len(match.path)

    def evict(self, pages: int) -> None:
        """Take all blank pages and so many more, and give them back."""
        taken = self.kv._cache.allocate(self.kv.pool.num_blank + pages)
        self.kv._cache.release(taken)


def pages(first: int, count: int) -> list[int]:
    return [first] * (count * PER_PAGE)


def priority(value: int, ms: float | None = None, decode: int = DEFAULT_PRIORITY) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, value, ms)], decode)


def test_the_one_used_least_recently_goes_first_and_its_last_page_before_the_others() -> None:
    cache = Cache(12)
    for first in (1, 2, 3):
        cache.run(pages(first, 3))
    cache.run(pages(1, 3))
    cache.evict(2)
    assert [cache.cached(pages(i, 3)) for i in (1, 2, 3)] == [3, 1, 3]
    cache.evict(2)
    assert [cache.cached(pages(i, 3)) for i in (1, 2, 3)] == [3, 0, 2]


def test_priority_comes_before_time() -> None:
    cache = Cache(12)
    cache.run(pages(1, 2), retention=priority(80))
    cache.run(pages(2, 2), retention=priority(10))
    cache.run(pages(3, 2))
    cache.run(pages(2, 2), retention=priority(20))  # used last
    cache.evict(2)
    assert [cache.cached(pages(i, 2)) for i in (1, 2, 3)] == [2, 0, 2]
    cache.evict(2)
    assert [cache.cached(pages(i, 2)) for i in (1, 2, 3)] == [2, 0, 0]


def test_a_priority_lapses_after_its_time() -> None:
    cache = Cache(12)
    cache.run(pages(1, 2), retention=priority(80, ms=5000))
    cache.run(pages(2, 2), retention=priority(60))
    cache.now = 4.9
    cache.run(pages(3, 2))
    cache.evict(2)
    assert [cache.cached(pages(i, 2)) for i in (1, 2, 3)] == [2, 2, 0]
    cache.now = 9.0
    cache.run(pages(1, 2))  # the time counts from the last use
    cache.now = 13.9
    cache.run(pages(3, 2))
    cache.evict(2)
    assert [cache.cached(pages(i, 2)) for i in (1, 2, 3)] == [2, 2, 0]
    cache.now = 14.1
    cache.evict(2)
    assert [cache.cached(pages(i, 2)) for i in (1, 2, 3)] == [0, 2, 0]


def test_parts_of_a_prompt_and_the_output_have_their_own_priorities() -> None:
    cache = Cache(12)
    ranges = [TokenRangeRetentionConfig(0, 6, 90), TokenRangeRetentionConfig(6, None, 50)]
    cache.run(pages(1, 3), output=8, retention=KvCacheRetentionConfig(ranges, 5))
    found = {len(n.token_ids): n for n in cache.kv._cache.tree.nodes()}
    assert len(found) == 1
    assert [n.priority for n in cache.kv._cache.tree.nodes()] == [90, 90, 50, 5, 5]
    cache.run(pages(2, 2), retention=priority(40))
    cache.evict(3)  # the output, then the other prompt
    assert (cache.cached(pages(1, 3)), cache.cached(pages(2, 2))) == (3, 1)


def test_a_page_with_others_behind_it_outlives_its_priority() -> None:
    cache = Cache(8)
    cache.run(pages(1, 1), retention=priority(0))
    cache.run(pages(1, 3))  # says nothing about the first page
    cache.run(pages(2, 2))
    cache.evict(1)
    assert cache.cached(pages(1, 3)) == 2
    cache.evict(2)
    assert (cache.cached(pages(1, 3)), cache.cached(pages(2, 2))) == (0, 2)


def test_pages_of_running_requests_are_no_victims() -> None:
    cache = Cache(6)
    cache.run(pages(1, 3))
    kv, ids = cache.kv, np.array([*pages(1, 3), 5], np.int32)
    asked = kv.ask(ids, CacheUser(), 4, kv.uncommitted_pages(0))
    assert (asked.needed, asked.available) == (4, 6)
    kv.attach(1, ids, CacheUser(), asked.match)
    assert kv.uncommitted_pages(4) == 2
    cache.evict(0)
    with pytest.raises(RuntimeError, match="4 pages asked for, 3 of 6 free"):
        kv._cache.allocate(4)
    other = kv.ask(ids, CacheUser(), 4, kv.uncommitted_pages(4))
    assert (other.needed, other.available) == (1, 2), "three of its four pages are held already"
    first = np.array([1])
    assert list(kv.departures(3).leave(first)) == [3]
    kv.attach(2, ids, CacheUser(), other.match)
    assert list(kv.departures(3).leave(first)) == [0], "the other holds them, too"
    departures = kv.departures(3)
    assert list(departures.leave(np.array([3, 2, 1]))) == [0, 0, 3]
    rows, missing = kv.lacking_pages(np.array([2, 1, 3]), np.array([12, 13, 5]))
    assert (rows.tolist(), missing.tolist()) == ([1, 2], [1, 2])


def test_the_host_keeps_what_is_worth_more() -> None:
    cache = Cache(6, host_pages=2)
    cache.run(pages(1, 2), retention=priority(80))
    cache.evict(2)
    assert cache.kv.stats().host_pages == 2
    cache.run(pages(2, 2))
    cache.evict(2)  # not worth the places of the first
    assert (cache.cached(pages(1, 2)), cache.cached(pages(2, 2))) == (2, 0)
    cache.run(pages(3, 2), retention=priority(80))
    cache.evict(2)  # as much, and newer
    assert (cache.cached(pages(1, 2)), cache.cached(pages(3, 2))) == (0, 2)


def test_events_let_others_follow() -> None:
    """A router's view, made of events alone, is what is cached."""
    cache = Cache(6, host_pages=3, events=1000)
    choose = np.random.default_rng(4)
    view: dict[int, Tier] = {}
    ids_of: dict[int, tuple[int, ...]] = {}
    last = -1
    for i in range(60):
        cache.run(pages(int(choose.integers(1, 5)), int(choose.integers(1, 4))), retention=priority(i % 100))
        if i % 20 == 19:
            cache.kv.clear()
        for event in cache.kv.events.since(last + 1):
            assert event.event_id == last + 1
            last = event.event_id
            if event.kind is EventKind.STORED:
                assert event.page_hash not in view
                assert event.tier is not None
                ids_of[event.page_hash] = (*ids_of.get(event.parent_hash, ()), *event.token_ids)
                view[event.page_hash] = event.tier
            elif event.kind is EventKind.MOVED:
                assert event.tier is not None
                assert view[event.page_hash] is not event.tier
                view[event.page_hash] = event.tier
            else:
                del view[event.page_hash]
        real: dict[tuple[int, ...], Tier] = {}
        for node in cache.kv._cache.tree.nodes():
            path, above = node.token_ids, node.parent
            while above is not None and above.parent is not None:
                path, above = above.token_ids + path, above.parent
            real[path] = Tier.DEVICE if node.on_device else Tier.HOST
        assert {ids_of[name]: tier for name, tier in view.items()} == real
    assert last > 100


def test_a_follower_sees_that_events_were_lost() -> None:
    cache = Cache(8, events=3)
    cache.run(pages(1, 5))
    assert [e.event_id for e in cache.kv.events.since(0)] == [2, 3, 4]
    assert [e.event_id for e in cache.kv.events.since(4)] == [4]
    assert cache.kv.events.since(5) == []
    assert cache.kv.events.next_id == 5
    silent = Cache(8)
    silent.run(pages(1, 5))
    assert silent.kv.events.since(0) == []


def test_names_of_pages_are_the_same_everywhere() -> None:
    """XXH3-64 of ids and parent's name: a router in another process computes them too."""
    import xxhash

    cache = Cache(8, events=9)
    cache.run([1, 2, 3, 4, 5, 6, 7, 8])
    first, second = cache.kv.events.since(0)
    root = xxhash.xxh3_64_intdigest(b"('', None, None)", 0)
    assert first.parent_hash == root
    assert first.page_hash == xxhash.xxh3_64_intdigest(np.arange(1, 5, dtype="<i4").tobytes(), root)
    assert second.page_hash == xxhash.xxh3_64_intdigest(
        np.arange(5, 9, dtype="<i4").tobytes(), first.page_hash
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60), st.data())
def test_the_queue_is_a_sorted_list(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    queue = EvictionQueue(lambda: 0.0)
    nodes = []
    for rank, use in entries:
        node = PageNode(b"", None, 0)
        node.priority, node.last_used = rank, use
        queue.add(node)
        nodes.append(node)
    for _ in range(data.draw(st.integers(0, 5))):
        if nodes:
            node = nodes.pop(data.draw(st.integers(0, len(nodes) - 1)))
            queue.discard(node)
            if data.draw(st.booleans()):  # used again
                node.last_used = 50
                queue.add(node)
                nodes.append(node)
    got = [queue.pop() for _ in range(len(nodes))]
    assert queue.pop() is None
    keys = [(n.priority, n.last_used) for n in got if n is not None]
    assert keys == sorted((n.priority, n.last_used) for n in nodes)
    assert set(got) == set(nodes)


def test_the_queue_does_not_grow_with_pages_that_come_and_go() -> None:
    queue, node = EvictionQueue(lambda: 0.0), PageNode(b"", None, 0)
    for _ in range(10_000):
        node.expires_at = 5.0
        queue.add(node)
        queue.discard(node)
    queue.add(node)
    assert len(queue._heap) <= 70
    assert len(queue._expiring) <= 140


def evict_us(num_pages: int) -> float:
    """Microseconds to evict a page from a full cache of short, unlike prompts; the best of some rounds."""
    kv = KvCache(num_pages=num_pages, tokens_per_page=4, num_slots=2, max_seq_len=16)
    cache = kv._cache
    for page in cache.allocate(num_pages):
        ids = np.array([page, page >> 3, 1, 2], np.int32)
        cache.store(cache.tree.root(Namespace()), [ids.tobytes()], [page], [None], "a")
        cache.release([page])
    assert kv.stats().device_pages == kv.num_free == num_pages
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        kv._cache.allocate(100)
        best = min(best, (time.perf_counter() - start) / 100)
    return best * 1e6


def test_evicting_costs_about_the_same_in_a_large_cache() -> None:
    """16 times the pages: 4 more levels of a heap, and not 16 times the work."""
    small, large = evict_us(2_500), evict_us(40_000)
    assert large < 4 * small + 10, f"{small:.1f} us of 2,500 pages, {large:.1f} us of 40,000"


def test_what_a_config_says_about_a_page() -> None:
    config = KvCacheRetentionConfig(
        [TokenRangeRetentionConfig(0, 40, 80, 1500), TokenRangeRetentionConfig(64, None, 1)],
        decode_retention_priority=7, decode_duration_ms=10,
    )  # fmt: skip
    assert config.of_page(0, 100) == config.of_page(32, 100) == Retention(80, 1.5)
    assert config.of_page(40, 100) is None
    assert config.of_page(64, 100) == Retention(1, None)
    assert config.of_page(100, 100) == Retention(7, 0.01)
    spelled: dict[str, Any] = {
        "token_range_retention_configs": [
            {"token_start": 0, "token_end": 40, "priority": 80, "duration_ms": 1500},
            {"token_start": 64, "priority": 1},
        ],
        "decode_retention_priority": 7,
        "decode_duration_ms": 10,
    }
    assert KvCacheRetentionConfig.of(spelled) == config
    assert KvCacheRetentionConfig.TokenRangeRetentionConfig is TokenRangeRetentionConfig
    assert KvCacheRetentionConfig.of(None) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (lambda: KvCacheRetentionConfig(7), "token_range_retention_configs = 7, expected a list"),  # type: ignore[arg-type]
        (lambda: priority(-1), r"configs\[0\].priority = -1, expected an integer in \[0, 100\]"),
        (lambda: priority(5, ms=0), "duration_ms = 0, expected milliseconds above 0, or None"),
        (lambda: KvCacheRetentionConfig(decode_retention_priority=True), "decode_retention_priority = True"),
        (lambda: KvCacheRetentionConfig(decode_duration_ms=float("nan")), "decode_duration_ms = nan"),
        (lambda: KvCacheRetentionConfig([TokenRangeRetentionConfig(-2)]), "token_start = -2, expected"),
    ],
)
def test_bad_retention_is_refused(config: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config()
