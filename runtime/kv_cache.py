"""Pages of the KV cache: who holds which, and the page table of every slot.

Only bookkeeping: the memory itself belongs to the executor. Page ids are indices into its pool.
Misuse raises RuntimeError, because it is a fault of the runtime and never of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_PAGE = -1


def pages_for(num_tokens: int, tokens_per_page: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // tokens_per_page)


class PagePool:
    """Free list and reference counts of `num_pages` pages.

    A page is free (count 0) or held by `count` owners; it returns to the free list when the last
    one releases it. The page freed last is handed out first, so that a small load stays in a few
    warm pages and a run is reproducible.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        first = len(self._free) - count
        pages = self._free[first:]
        pages.reverse()
        del self._free[first:]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """One more owner of a page that is held."""
        if self._references[page] == 0:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner less of each page."""
        for page in pages:
            if self._references[page] == 0:
                raise RuntimeError(f"page {page} released more often than held")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)


class KvCache:
    """Page tables of all slots over one pool.

    Args:
        num_pages, tokens_per_page: the pool.
        num_slots: requests that can hold pages at a time.
        max_seq_len: longest sequence in tokens, which bounds a table's width.

    Attributes:
        tables: [num_slots, max_pages_per_seq] int32, NO_PAGE beyond the pages in use.
    """

    def __init__(self, *, num_pages: int, tokens_per_page: int, num_slots: int, max_seq_len: int) -> None:
        self.tokens_per_page = tokens_per_page
        self.pool = PagePool(num_pages)
        width = pages_for(max_seq_len, tokens_per_page)
        self.tables = np.full((num_slots, width), NO_PAGE, dtype=np.int32)
        self._num_used = np.zeros(num_slots, np.int32)
        self._held_tokens = np.zeros(num_slots, np.int32)  # what those pages hold

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `grow` can give."""
        return self.pool.num_free

    def pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self.tokens_per_page)

    def held_pages(self, slots: np.ndarray) -> np.ndarray:
        """int32 [B]: pages that come back when a slot is freed."""
        held: np.ndarray = self._num_used[slots]
        return held

    def missing_pages(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """int32 [B]: pages each of the slots lacks to hold its `num_tokens` tokens."""
        return np.maximum(-(-num_tokens // self.tokens_per_page) - self._num_used[slots], 0)

    def pages_of(self, slot: int) -> list[int]:
        """The slot's pages, in order of the tokens they hold."""
        used: list[int] = self.tables[slot, : self._num_used[slot]].tolist()
        return used

    def grow(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Give each of the slots the pages it still lacks to hold its `num_tokens` tokens.

        Slots are different ones; when the pages do not suffice for all, none gets any.
        """
        short = np.flatnonzero(num_tokens > self._held_tokens[slots])
        # The usual decode step needs no page or few: nothing is done for the others.
        if len(short) == 0:
            return
        slots = slots[short]
        used = self._num_used[slots]
        needed = -(-num_tokens[short] // self.tokens_per_page)
        if needed.max() > self.tables.shape[1]:
            row = int(needed.argmax())
            raise RuntimeError(
                f"slot {slots[row]} needs {needed[row]} pages, its table holds {self.tables.shape[1]}"
            )
        more = needed - used
        ends = np.cumsum(more)
        places = np.arange(ends[-1]) - np.repeat(ends - more - used, more)
        self.tables[np.repeat(slots, more), places] = self.pool.allocate(int(ends[-1]))
        self._num_used[slots] = needed
        self._held_tokens[slots] = needed * self.tokens_per_page

    def free(self, slot: int) -> None:
        """Give back all pages of the slot."""
        # Last page first, so that the next request gets them in the same order again.
        self.pool.release(self.pages_of(slot)[::-1])
        self.tables[slot, : self._num_used[slot]] = NO_PAGE
        self._num_used[slot] = self._held_tokens[slot] = 0
