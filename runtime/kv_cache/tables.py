"""The page table of every slot, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tapeout.runtime.kv_cache.pages import NO_PAGE, pages_for

_NONE = np.array(0, np.int32)
# Slots whose pages are read together, and how many of the first ones: mostly no others are shared.
_BLOCK, _HEAD = 32, 16


class PageTables:
    """Struct of arrays, so that a decode step in which no request needs a page costs a comparison.

    Attributes:
        tables: [num_slots, max_pages_per_seq] int32, NO_PAGE beyond the pages in use.
        num_used: [num_slots] int32 pages in use. total: their sum; a page in two tables counts twice.
    """

    def __init__(self, *, tokens_per_page: int, num_slots: int, max_seq_len: int) -> None:
        self.tokens_per_page = tokens_per_page
        width = self._max_pages = pages_for(max_seq_len, tokens_per_page)
        self.tables = np.full((num_slots, width), NO_PAGE, dtype=np.int32)
        self._flat = self.tables.reshape(-1)
        self.num_used = np.zeros(num_slots, np.int32)
        self.total = 0
        self._held_tokens = np.zeros(num_slots, np.int32)  # what those pages hold
        # As arrays, for which NumPy takes less time than for numbers of Python's.
        self._width = np.array(width)
        self._page_tokens = np.array(tokens_per_page, np.int32)
        self._last_of_page = np.array(tokens_per_page - 1, np.int32)

    def pages_of(self, slot: int) -> list[int]:
        """The slot's pages, in order of the tokens they hold."""
        used: list[int] = self.tables[slot, : self.num_used.item(slot)].tolist()
        return used

    def lacking(self, slots: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the slots lack pages to hold their `num_tokens` tokens: int64 [L] indices into `slots`,
        ascending, and int32 [L] how many each lacks."""
        held = self._held_tokens[slots]
        # The usual decode step needs no page or few: nothing is done for the others.
        rows = (num_tokens > held).nonzero()[0]
        return rows, -((held[rows] - num_tokens[rows]) // self._page_tokens)

    def missing(self, num_tokens: np.ndarray) -> np.ndarray:
        """int32 [num_slots]: pages that each slot lacks to hold its `num_tokens` tokens."""
        missing: np.ndarray = num_tokens - self._held_tokens
        missing += self._last_of_page
        missing //= self._page_tokens
        return np.maximum(missing, _NONE, out=missing)

    def grow(
        self, slots: np.ndarray, num_tokens: np.ndarray, allocate: Callable[[int], Sequence[int]]
    ) -> np.ndarray | None:
        """Give each of the slots the pages it still lacks to hold its `num_tokens` tokens.

        Slots are different ones; when `allocate` raises, none has got any. Returns the slots that got
        pages, None when there are none.
        """
        short, more = self.lacking(slots, num_tokens)
        if len(short) == 0:
            return None
        slots = slots[short]
        used = self.num_used[slots]
        needed = used + more
        count, most = sum(more.tolist()), max(needed.tolist())
        if most > self._max_pages:
            slot = slots[needed.argmax()]
            raise RuntimeError(f"slot {slot} needs {most} pages, its table holds {self._max_pages}")
        rows, places = slots * self._width, used
        if count > len(slots):  # somebody reads context: more than a page for each
            rows = rows.repeat(more)
            places = np.arange(count) - (more.cumsum() - more - used).repeat(more)
        # One index into the flat array: NumPy takes half as long as with two.
        self._flat[rows + places] = allocate(count)
        self.num_used[slots] = needed
        self.total += count
        self._held_tokens[slots] = needed * self._page_tokens
        return slots

    def begin(self, slot: int, pages: Sequence[int]) -> None:
        """The first pages of a slot that has none."""
        count = len(pages)
        if count:
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


class Departures:
    """Counts the pages that come back when slots are freed one after the other.

    A page that several slots share comes back with the last owner: with none of them while somebody else
    holds it.

    Args:
        owners: [num_pages] how many hold each page; None where nobody shares any.
        most: slots that leave at most. A page that more hold stays, and nobody has to count.
    """

    def __init__(self, tables: PageTables, owners: Sequence[int] | None, most: int) -> None:
        self._tables, self._owners, self._most = tables, owners, most
        self._staying: dict[int, int] = {}  # owners left of pages that were shared

    def leave(self, slots: np.ndarray) -> Iterator[int]:
        """For each of these slots, pages that come back when it is freed, too. A slot has left once its
        number is asked for, and leaves once.

        slots: int64 [S].
        """
        for first in range(0, len(slots), _BLOCK):
            yield from self._leave(slots[first : first + _BLOCK])

    def _leave(self, slots: np.ndarray) -> Iterator[int]:
        tables = self._tables
        counts = tables.num_used[slots].tolist()
        owners, staying, most = self._owners, self._staying, self._most
        if owners is None:
            yield from counts
            return
        heads = tables.tables[:, : min(max(counts), _HEAD)][slots].tolist()
        for row, (count, head) in enumerate(zip(counts, heads, strict=True)):
            # Whoever holds a page holds those before it: behind one's own there is none that others hold.
            pages = head if count <= _HEAD or owners[head[-1]] == 1 else tables.pages_of(slots.item(row))
            for page in pages[:count]:
                if (held := owners[page]) == 1:
                    break
                if held <= most:
                    held = staying[page] = staying.get(page, held) - 1
                count -= held > 0
            yield count
