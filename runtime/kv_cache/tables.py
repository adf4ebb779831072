"""The page table of every slot, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tapeout.runtime.kv_cache.pages import NO_PAGE, pages_for

_FEW_PAGES = 512


class PageTables:
    """Struct of arrays, so that a decode step in which no request needs a page costs a comparison.

    Attributes:
        tables: [num_slots, max_pages_per_seq] int32, NO_PAGE beyond the pages in use.
        num_used: [num_slots] int32 pages in use. total: their sum; a page in two tables counts twice.
    """

    def __init__(self, *, tokens_per_page: int, num_slots: int, max_seq_len: int) -> None:
        self.tokens_per_page = tokens_per_page
        width = pages_for(max_seq_len, tokens_per_page)
        self.tables = np.full((num_slots, width), NO_PAGE, dtype=np.int32)
        self._flat = self.tables.reshape(-1)
        self.num_used = np.zeros(num_slots, np.int32)
        self.total = 0
        self._held_tokens = np.zeros(num_slots, np.int32)  # what those pages hold

    def pages_of(self, slot: int) -> list[int]:
        """The slot's pages, in order of the tokens they hold."""
        used: list[int] = self.tables[slot, : self.num_used[slot]].tolist()
        return used

    def grow(
        self, slots: np.ndarray, num_tokens: np.ndarray, allocate: Callable[[int], Sequence[int]]
    ) -> np.ndarray | None:
        """Give each of the slots the pages it still lacks to hold its `num_tokens` tokens.

        Slots are different ones; when `allocate` raises, none has got any. Returns the slots that got
        pages, None when there are none.
        """
        short = (num_tokens > self._held_tokens[slots]).nonzero()[0]
        # The usual decode step needs no page or few: nothing is done for the others.
        if len(short) == 0:
            return None
        slots = slots[short]
        used = self.num_used[slots]
        needed = -(-num_tokens[short] // self.tokens_per_page)
        width, count = self.tables.shape[1], int(needed.sum()) - int(used.sum())
        if needed.max() > width:
            row = int(needed.argmax())
            raise RuntimeError(f"slot {slots[row]} needs {needed[row]} pages, its table holds {width}")
        rows, places = slots * width, used
        if count > len(slots):  # somebody reads context: more than a page for each
            more = needed - used
            rows = rows.repeat(more)
            places = np.arange(count) - (more.cumsum() - more - used).repeat(more)
        # One index into the flat array: NumPy takes half as long as with two.
        self._flat[rows + places] = allocate(count)
        self.num_used[slots] = needed
        self.total += count
        self._held_tokens[slots] = needed * self.tokens_per_page
        return slots

    def begin(self, slot: int, pages: Sequence[int]) -> None:
        """The first pages of a slot that has none."""
        count = len(pages)
        self.tables[slot, :count] = pages
        self.num_used[slot] = count
        self._held_tokens[slot] = count * self.tokens_per_page
        self.total += count

    def clear(self, slot: int) -> list[int]:
        """Empty a slot; returns the pages it had."""
        pages = self.pages_of(slot)
        self.tables[slot, : len(pages)] = NO_PAGE
        self.num_used[slot] = self._held_tokens[slot] = 0
        self.total -= len(pages)
        return pages

    def returning(self, slots: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """int32 [B]: see `KvCache.returning_pages`. owners: int [num_pages], how many have each page."""
        returning: np.ndarray = self.num_used[slots]
        bases = slots * self.tables.shape[1]
        # Whoever holds a page holds those before it: without a first page that others hold there is none.
        rows = ((owners[self._flat[bases]] > 1) & (returning > 0)).nonzero()[0]
        if len(rows):
            bases = bases[rows]
            shared = returning[rows]
            if shared.sum() > _FEW_PAGES:  # else all are looked at, of whomever they are
                shared = self._num_shared(bases, shared, owners)
            returning[rows] -= shared
            ends = shared.cumsum()
            places = np.arange(ends[-1]) + (bases - ends + shared).repeat(shared)
            pages, rows = self._flat[places], rows.repeat(shared)
            turn = pages.argsort(kind="stable")  # those of the same page in the order of rows
            pages, rows = pages[turn], rows[turn]
            is_first = np.ones(len(pages), bool)
            np.not_equal(pages[1:], pages[:-1], out=is_first[1:])
            first = is_first.nonzero()[0]
            among_them = np.append(first[1:], len(pages)) - first
            come_back = first[among_them == owners[pages[first]]]
            np.add.at(returning, rows[come_back], 1)
        return returning

    def _num_shared(self, bases: np.ndarray, num_used: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """int32 [B]: pages of each slot that others hold, too, of slots whose first page others hold. Such
        pages are the first ones, and halving finds how many; for all slots at once."""
        low, high = np.ones(len(bases), np.int32), num_used
        while (open_ := low < high).any():
            middle = (low + high) >> 1  # of a page that exists, where the search is open
            is_shared = owners[self._flat[bases + middle * open_]] > 1
            high = np.where(open_ & ~is_shared, middle, high)
            low = np.where(open_ & is_shared, middle + 1, low)
        return low
