"""Page pool and page tables as a state machine against a plain model."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tapeout.runtime.kv_cache import NO_PAGE, KvCache, PagePool
from tapeout.runtime.kv_cache.tables import Departures, PageTables

NUM_PAGES, PER_PAGE, SLOTS, MAX_SEQ = 12, 4, 3, 32


class CacheMachine(RuleBasedStateMachine):
    """Slots grow and are freed; single pages are shared and released, as reuse will do."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(
            num_pages=NUM_PAGES, tokens_per_page=PER_PAGE, num_slots=SLOTS, max_seq_len=MAX_SEQ
        )
        self.tokens = [0] * SLOTS
        self.shared: list[int] = []

    @rule(more=st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, 9), min_size=1))
    def grow(self, more: dict[int, int]) -> None:
        slots = list(more)
        wanted = [min(self.tokens[s] + more[s], MAX_SEQ) for s in slots]
        before = [self.cache.pages_of(s) for s in slots]
        lacking = sum(-(-w // PER_PAGE) - len(b) for w, b in zip(wanted, before, strict=True))
        arrays = np.array(slots), np.array(wanted)
        if lacking > self.cache.pool.num_free:
            with pytest.raises(RuntimeError, match="free"):
                self.cache.grow(*arrays)
        else:
            self.cache.grow(*arrays)
            self.tokens = [dict(zip(slots, wanted, strict=True)).get(s, t) for s, t in enumerate(self.tokens)]
        for slot, pages in zip(slots, before, strict=True):
            assert self.cache.pages_of(slot)[: len(pages)] == pages, "a page a sequence wrote to moved"

    @rule(slot=st.integers(0, SLOTS - 1))
    def free(self, slot: int) -> None:
        self.cache.free(slot)
        self.tokens[slot] = 0

    @precondition(lambda self: any(self.tokens))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = [p for s in range(SLOTS) for p in self.cache.pages_of(s)]
        page = data.draw(st.sampled_from(pages))
        self.cache.pool.retain(page)
        self.shared.append(page)

    @precondition(lambda self: self.shared)
    @rule()
    def release_shared(self) -> None:
        self.cache.pool.release([self.shared.pop()])

    @invariant()
    def every_page_is_free_or_owned(self) -> None:
        tables = [self.cache.pages_of(s) for s in range(SLOTS)]
        held = [p for table in tables for p in table]
        assert len(held) == len(set(held))
        for page in range(NUM_PAGES):
            owners = held.count(page) + self.shared.count(page)
            assert self.cache.pool.references(page) == owners
        assert self.cache.pool.num_free == NUM_PAGES - len({*held, *self.shared})
        for slot, table in enumerate(tables):
            assert len(table) == -(-self.tokens[slot] // PER_PAGE)
            assert (self.cache.tables[slot, len(table) :] == NO_PAGE).all()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_misuse_is_an_error() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([page])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.retain(page)


def test_only_idle_pages_are_dropped_together() -> None:
    pool = PagePool(3)
    idle, held, plain = pool.allocate(3)
    pool.keep([idle, held])
    with pytest.raises(RuntimeError, match=f"page {held} is free or kept already"):
        pool.keep([held])
    pool.release([idle, plain])
    for page in (held, plain):
        with pytest.raises(RuntimeError, match=f"page {page} is not idle"):
            pool.drop_idle([page])
    assert (pool.num_blank, pool.num_idle) == (1, 1)
    pool.drop_idle([idle])
    assert (pool.num_blank, pool.num_idle, pool.is_kept(idle)) == (2, 0, False)
    assert pool.allocate(1) == [idle], "the one freed last"


def test_a_table_holds_no_more_than_the_longest_sequence() -> None:
    cache = KvCache(num_pages=NUM_PAGES, tokens_per_page=PER_PAGE, num_slots=SLOTS, max_seq_len=MAX_SEQ)
    with pytest.raises(RuntimeError, match="slot 2 needs 9 pages, its table holds 8"):
        cache.grow(np.array([0, 2]), np.array([4, MAX_SEQ + 1], np.int32))
    assert cache.num_used == 0


@given(data=st.data(), slots=st.integers(1, 80), width=st.sampled_from([3, 16, 17, 40]))
@settings(max_examples=60, deadline=None)
def test_pages_come_back_with_the_last_who_holds_them(data: st.DataObject, slots: int, width: int) -> None:
    """Against counting owners page by page; who holds a page of a path holds those before it."""
    tables = PageTables(tokens_per_page=1, num_slots=slots, max_seq_len=width)
    stems = [list(range(first, first + width)) for first in (0, width)]
    owners, blank = Counter[int](), 2 * width
    rand = data.draw(st.randoms(use_true_random=False))
    for slot in range(slots):
        shared, own = rand.randint(0, width), rand.randint(0, 3)
        pages = rand.choice(stems)[:shared]
        pages += range(blank, blank + min(own, width - len(pages)))
        blank += own
        tables.begin(slot, pages)
        owners.update(pages)
    owners.update(rand.choice(stems)[: rand.randint(0, width)])  # a pin
    order = rand.sample(range(slots), rand.randint(0, slots))
    departures = Departures(tables, [owners[page] for page in range(blank)], len(order))
    stop = rand.randint(0, len(order))  # in two turns, of which the first asks for fewer than it names
    first = departures.leave(np.array(order[: stop + 2], np.int64))
    back = [next(first) for _ in range(stop)]
    back += departures.leave(np.array(order[stop:], np.int64))
    expected = []
    for slot in order:
        left = tables.pages_of(slot)
        owners.subtract(left)
        expected.append(sum(owners[page] == 0 for page in left))
    assert back == expected
