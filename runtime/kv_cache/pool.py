"""Who holds which page of the device's pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class PagePool:
    """Free list and reference counts of `num_pages` pages.

    A page is held by as many owners as its count says (page tables of requests, pins). With count 0
    it is free, or idle when the prefix cache keeps it: an idle page holds something that may be wanted
    again and is given up (`drop`) when nothing else is left. The page freed last is handed out first,
    so that a small load stays in a few warm pages and a run is reproducible.

    Attributes:
        reference_counts: [num_pages] owners of each page, to read.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = array("i", bytes(4 * num_pages))
        self.reference_counts: Sequence[int] = self._references
        self._kept = bytearray(num_pages)  # 1: the prefix cache knows what it holds
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """Pages nobody holds: what requests can still get, idle ones included."""
        return len(self._free) + self._num_idle

    @property
    def num_blank(self) -> int:
        """Pages that can be handed out as they are."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that only the prefix cache keeps."""
        return self._num_idle

    def references(self, page: int) -> int:
        return self._references[page]

    def is_kept(self, page: int) -> bool:
        return bool(self._kept[page])

    def allocate(self, count: int) -> list[int]:
        """Take `count` blank pages, each with one reference."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        first = len(self._free) - count
        pages = self._free[first:]
        pages.reverse()
        del self._free[first:]
        references = self._references
        for page in pages:
            references[page] = 1
        return pages

    def retain(self, page: int) -> bool:
        """One more owner of a page that is held or kept; True when it was idle until now."""
        if self._references[page] == 0:
            if not self._kept[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._num_idle -= 1
        self._references[page] += 1
        return self._references[page] == 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One owner less of each page; returns those that are idle now."""
        idle, references = [], self._references
        for page in pages:
            left = references[page] - 1
            if left < 0:
                raise RuntimeError(f"page {page} released more often than held")
            references[page] = left
            if left == 0:
                if self._kept[page]:
                    self._num_idle += 1
                    idle.append(page)
                else:
                    self._free.append(page)
        return idle

    def keep(self, pages: Iterable[int]) -> None:
        """The prefix cache knows what these pages hold, which are held."""
        kept, references = self._kept, self._references
        for page in pages:
            if kept[page] or references[page] == 0:
                raise RuntimeError(f"page {page} is free or kept already")
            kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache forgets a page; it is free now, or when its last owner leaves."""
        if not self._kept[page]:
            raise RuntimeError(f"page {page} is not kept")
        self._kept[page] = 0
        if self._references[page] == 0:
            self._num_idle -= 1
            self._free.append(page)

    def drop_idle(self, pages: Sequence[int]) -> None:
        """The same for pages nobody holds, all of which are free now."""
        kept, references = self._kept, self._references
        for page in pages:
            if not kept[page] or references[page]:
                raise RuntimeError(f"page {page} is not idle")
            kept[page] = 0
        self._num_idle -= len(pages)
        self._free += pages
