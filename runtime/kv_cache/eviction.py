"""Which cached page goes first: lowest priority, then used least recently; leaves before their parents."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from tapeout.runtime.kv_cache.radix_tree import EvictionKey, PageNode
from tapeout.runtime.kv_cache.retention import DEFAULT_PRIORITY

_Entry = tuple[int, int, int, PageNode, int]  # priority, last use, tie, node, stamp
_Expiry = tuple[float, int, PageNode, int]


class EvictionQueue:
    """The pages that may be evicted from one tier.

    The owner adds a page when nobody holds it and no page behind it is on the tier, and takes it out when
    that ends. All calls cost O(log n), amortized: a page that leaves is not searched for, its entry is
    known by its old stamp when it comes up, and entries of that kind are swept out when they are more
    than the others.

    Args:
        clock: seconds, monotonic; what `PageNode.expires_at` is told by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[_Entry] = []
        self._expiring: list[_Expiry] = []
        self._tie = count()
        self._members: set[PageNode] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: PageNode) -> bool:
        return node in self._members

    def add(self, node: PageNode) -> None:
        self._members.add(node)
        node.stamp += 1
        if node.expires_at is not None:
            heapq.heappush(self._expiring, (node.expires_at, next(self._tie), node, node.stamp))
        heapq.heappush(self._heap, (*node.eviction_key, next(self._tie), node, node.stamp))
        if len(self._heap) > 2 * len(self._members) + 64:
            self._sweep()

    def discard(self, node: PageNode) -> None:
        if node in self._members:
            self._members.remove(node)
            node.stamp += 1

    def first(self) -> PageNode | None:
        """The page to evict next; None when there is none."""
        self._lapse()
        while self._heap:
            entry = self._heap[0]
            node = entry[3]
            if entry[4] == node.stamp and node in self._members:
                return node
            heapq.heappop(self._heap)
        return None

    def first_key(self) -> EvictionKey | None:
        """What orders the page to evict next; None when there is none."""
        node = self.first()
        return None if node is None else node.eviction_key

    def pop(self) -> PageNode | None:
        """Take out the page to evict next."""
        node = self.first()
        if node is not None:
            self.discard(node)
        return node

    def _lapse(self) -> None:
        """Pages whose time is over have the default priority from now on."""
        if not self._expiring:
            return
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            _, _, node, stamp = heapq.heappop(self._expiring)
            if stamp == node.stamp and node in self._members:
                node.priority, node.seconds, node.expires_at = DEFAULT_PRIORITY, None, None
                self.add(node)

    def _sweep(self) -> None:
        self._heap = [e for e in self._heap if e[4] == e[3].stamp and e[3] in self._members]
        heapq.heapify(self._heap)
        self._expiring = [e for e in self._expiring if e[3] == e[2].stamp and e[2] in self._members]
        heapq.heapify(self._expiring)
