"""Pages on the host: a second pool, for what has left the device and may be wanted again."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.runtime.kv_cache.eviction import EvictionQueue
from tapeout.runtime.kv_cache.pages import NO_PAGE
from tapeout.runtime.kv_cache.radix_tree import PageNode


class HostTier:
    """Free host pages, and which cached page leaves the host first.

    A page that is on the host is not on the device. Only pages without any page behind them may leave.
    """

    def __init__(self, num_pages: int, clock: Callable[[], float]) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._leaves = EvictionQueue(clock)
        self._locked: set[PageNode] = set()

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def victim_for(self, node: PageNode) -> PageNode | None:
        """The page that would have to leave so that `node` may come; None when there is room or when
        nothing on the host may leave for it (see `can_take`)."""
        return None if self._free else self._leaves.first()

    def can_take(self, node: PageNode) -> bool:
        """Whether `node` gets a place, maybe that of a page whose priority is not higher.

        A page with pages behind it always goes before those: they would be lost with it.
        """
        if self._free:
            return True
        first = self._leaves.first()
        return first is not None and (first.priority <= node.priority or bool(node.children))

    def put(self, node: PageNode) -> int:
        """Give a node that leaves the device a free place."""
        node.host_page = self._free.pop()
        self.may_leave(node)
        return node.host_page

    def lock(self, node: PageNode) -> None:
        """Nothing may take the node's place until it is unlocked or taken."""
        self._leaves.discard(node)
        self._locked.add(node)

    def unlock(self, node: PageNode) -> None:
        self._locked.discard(node)
        self.may_leave(node)

    def may_leave(self, node: PageNode) -> None:
        """Something about the node has changed: it may leave now if it is here and no page is behind it."""
        if node.host_page != NO_PAGE and not node.children and node not in self._locked:
            self._leaves.add(node)

    def take(self, node: PageNode) -> int:
        """The node leaves; returns the place it had, which is free now."""
        self._leaves.discard(node)
        self._locked.discard(node)
        place, node.host_page = node.host_page, NO_PAGE
        self._free.append(place)
        return place
