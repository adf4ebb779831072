"""How many context tokens each request gets in a step: the chunking policies, as array operations.

All of them cut a chunk so that it ends with a page, where the cut leaves anything at all: a page that is
filled is read and shared as a whole. What is left of the budget is less than a page and stays unused.
Somebody always gets tokens, the first in turn at the least, be it less than a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tapeout.runtime.scheduler.policies import ChunkingPolicy


@dataclass(frozen=True)
class Chunking:
    """A policy and its numbers: most tokens of a chunk (`limit`), and the page that chunks end with."""

    policy: ChunkingPolicy
    limit: int
    tokens_per_page: int

    def sizes(
        self, starts: np.ndarray, rest: np.ndarray, last_step: Callable[[], np.ndarray], budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens for each of C requests, int32 [C], and what each would get with tokens to spare, int32 [C].

        The first is 0 for those that have to wait, and at most `budget` in all; it is `rest` itself where
        everybody gets all of that.

        Args:
            starts, rest: [C] position where each goes on, and tokens left of its context, at least 1.
            last_step: gives [C], the step each ran in last. Under EQUAL_PROGRESS, when not even a page's
                worth for each is there, those that waited longest are served.
        """
        wanted = rest
        if np.count_nonzero(rest > self.limit):  # half the time of max()
            wanted = self._cut(starts, rest, np.minimum(rest, self.limit))
        if np.add.reduce(wanted, dtype=np.int64) <= budget:
            return wanted, wanted
        ends = wanted.cumsum(dtype=np.int64)
        if self.policy is not ChunkingPolicy.EQUAL_PROGRESS:
            return self._in_order(starts, wanted, ends, budget), wanted
        turn = last_step().argsort(kind="stable")
        sizes = np.empty_like(wanted)
        sizes[turn] = self._equal(starts[turn], wanted[turn], budget)
        return sizes, wanted

    def _in_order(self, starts: np.ndarray, wanted: np.ndarray, ends: np.ndarray, budget: int) -> np.ndarray:
        """All that is wanted for the first ones, what is left for the next, nothing for the others."""
        served = int(np.searchsorted(ends, budget, side="right"))
        sizes = wanted.copy()
        sizes[served:] = 0
        # A forced chunk is whole or none; the very first is cut all the same, or it might never run.
        if served == 0 or self.policy is not ChunkingPolicy.FORCE_CHUNK:
            left = budget - (int(ends[served - 1]) if served else 0)
            one = slice(served, served + 1)
            sizes[one] = self._cut(
                starts[one], wanted[one], np.array([left], np.int32), least=int(served == 0)
            )
        return sizes

    def _equal(self, starts: np.ndarray, wanted: np.ndarray, budget: int) -> np.ndarray:
        """The same number of units for all who want so many, as many as the budget has for all."""
        unit = self.tokens_per_page
        # The largest level at which everybody fits: that of an even share, if all want more; else by halving.
        low, high = budget // (len(wanted) * unit), budget // unit + 1
        if int(wanted.min()) >= (low + 1) * unit:
            high = low + 1
        while high - low > 1:
            level = (low + high) // 2
            low, high = (
                (level, high) if int(np.minimum(wanted, level * unit).sum()) <= budget else (low, level)
            )
        if low:
            sizes = self._cut(starts, wanted, np.minimum(wanted, low * unit), least=0)
        else:
            sizes = np.zeros_like(wanted)
        # Then one unit more for the first ones, while there are any.
        more = self._cut(starts, wanted, np.minimum(wanted, sizes + unit), least=0) - sizes
        more[more.cumsum(dtype=np.int64) > budget - int(sizes.sum())] = 0
        sizes += more
        if not sizes.any():
            sizes[:1] = self._cut(starts[:1], wanted[:1], np.minimum(wanted[:1], budget))
        return sizes

    def _cut(self, starts: np.ndarray, whole: np.ndarray, sizes: np.ndarray, *, least: int = 1) -> np.ndarray:
        """Sizes that end with a page where they are less than the whole.

        A chunk that would have no token left keeps its size if `least` is 1, and is dropped otherwise.
        """
        ends = starts + sizes
        cut = sizes - ends % self.tokens_per_page
        cut = np.where(cut > 0, cut, sizes) if least else np.maximum(cut, 0)
        chunks: np.ndarray = np.where(sizes < whole, cut, sizes)
        return chunks
