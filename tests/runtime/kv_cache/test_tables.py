"""Page pool and page tables as a state machine against a plain model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tapeout.runtime.kv_cache import NO_PAGE, KvCache, PagePool

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
