"""The prefix cache: pages in the tree, on the device or on the host, and their ways in and out.

It knows pages, not requests: whose tables they stand in is `cache.py`'s. Every page it moves is
written down in `copies`, which the executor carries out in that order before the next step.

What holds at any time: a page on the device has its whole path on the device, and whoever holds a page
of the tree holds its path. So every page nobody holds can be evicted, leaves first, and
`pool.num_free` is what requests can really get.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

from tapeout.runtime.kv_cache.events import EventBuffer, EventKind, Tier
from tapeout.runtime.kv_cache.eviction import EvictionQueue
from tapeout.runtime.kv_cache.host_tier import HostTier
from tapeout.runtime.kv_cache.pages import NO_PAGE, CopyKind, PageCopy
from tapeout.runtime.kv_cache.pool import PagePool
from tapeout.runtime.kv_cache.radix_tree import Namespace, PageNode, PartialMatch, RadixTree
from tapeout.runtime.kv_cache.retention import Retention


class PrefixMatch(NamedTuple):
    """What is cached of a prompt: full pages, and the beginning of one more."""

    path: Sequence[PageNode] = ()
    partial: PartialMatch | None = None


class PrefixCache:
    """Pages in the tree over `pool`, with a host tier of `host_pages`.

    Attributes:
        copies: what the executor has to do before the next step, in order.
        evicted: of pages that left the device for want of space, since the owner emptied this: who had
            computed each, and whether it is on the host now.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        *,
        host_pages: int,
        events: EventBuffer,
        clock: Callable[[], float],
    ) -> None:
        self.tree = tree
        self.events = events
        self.host = HostTier(host_pages, clock)
        self.copies: list[PageCopy] = []
        self.evicted: list[tuple[str, bool]] = []
        self._pool = pool
        self._clock = clock
        self._idle = EvictionQueue(clock)
        self._node_of: list[PageNode | None] = [None] * pool.num_pages
        self._uses = count(1)
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Fields of `CacheStats` that tell of pages; what requests found is counted by their owner."""
        host = self.host.num_used
        return {**self._counts, "device_pages": self.tree.num_nodes - host, "host_pages": host}

    # ---- finding ----------------------------------------------------------------------------

    def unheld(self, path: Iterable[PageNode]) -> int:
        """Pages of the path that nobody holds: holding it takes so many from the pool."""
        references = self._pool.reference_counts
        return sum([n.page == NO_PAGE or references[n.page] == 0 for n in path])

    # ---- holding ----------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take pages that hold nothing, each with one reference; idle pages are evicted as needed."""
        pool = self._pool
        if (short := count - pool.num_blank) > 0:
            if short > pool.num_idle:
                raise RuntimeError(f"{count} pages asked for, {pool.num_free} of {pool.num_pages} free")
            self._evict(short)
        return pool.allocate(count)

    def hold(self, path: Sequence[PageNode]) -> int:
        """One more owner of every page of a path; those on the host come back. Returns how many did.

        The pool has room for `unheld(path)` pages.
        """
        back = []
        for node in path:  # all of them before anything is evicted for one of them
            if node.on_device:
                self._retain(node)
            else:
                self.host.lock(node)
                back.append(node)
        if not back:
            return 0
        for node, page in zip(back, self.allocate(len(back)), strict=True):
            self.copies.append(PageCopy(CopyKind.ONBOARD, self.host.take(node), page))
            self._settle_on_device(node, page)
            self._counts["onboarded_pages"] += 1
            self._tell_moved(node, Tier.DEVICE)
        return len(back)

    def copy(self, node: PageNode) -> int | None:
        """A page of the caller's own with the contents of `node`; None when there is no room but its own,
        or when the node has just gone to make room for others."""
        if node.removed:
            return None
        if node.on_device:
            self._retain(node)
            page = self.allocate(1)[0] if self._pool.num_free else None
            if page is not None:
                self.copies.append(PageCopy(CopyKind.WITHIN, node.page, page))
            self.release([node.page])
            return page
        if not self._pool.num_free:
            return None
        self.host.lock(node)
        page = self.allocate(1)[0]
        self.copies.append(PageCopy(CopyKind.ONBOARD, node.host_page, page))
        node.last_used = next(self._uses)
        self.host.unlock(node)
        self._counts["onboarded_pages"] += 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """One owner less of each page, in the tree or not; a page's path is not released before it."""
        used, now = next(self._uses), None
        for page in self._pool.release(pages):
            node = self._node_of[page]
            assert node is not None
            node.last_used = used
            if node.seconds is not None:
                now = self._clock() if now is None else now
                node.expires_at = now + node.seconds
            if not node.device_children:
                self._idle.add(node)

    def _retain(self, node: PageNode) -> None:
        if self._pool.retain(node.page):
            self._idle.discard(node)
            node.expires_at = None

    # ---- entering ---------------------------------------------------------------------------

    def store(
        self,
        parent: PageNode,
        keys: Sequence[bytes],
        pages: Sequence[int],
        retentions: Sequence[Retention | None],
        owner: str,
    ) -> list[PageNode]:
        """Put full pages that the caller holds behind `parent`, whose path the caller holds too, each behind
        the one before it; the tree has none with the ids of the first.

        Returns their nodes.
        """
        nodes = self.tree.insert_path(parent, keys, pages)
        self._pool.keep(pages)
        for node, page, retention in zip(nodes, pages, retentions, strict=True):
            node.owner, self._node_of[page] = owner, node
            if retention is not None:
                self.set_retention(node, retention)
        self._counts["stored_pages"] += len(nodes)
        if self.events.enabled:
            for node in nodes:
                self._tell(EventKind.STORED, node, node.token_ids, Tier.DEVICE, node.priority)
        return nodes

    def share(self, node: PageNode, page: int, retention: Retention | None) -> bool:
        """A page of the caller's with what a page of the tree holds; the caller holds the path before it.

        One of them is enough: the caller's takes the place of one nobody holds; else the caller gets the
        tree's (one reference is his) and has to let go of its own. Returns whether the node has the
        caller's page.
        """
        if retention is not None:
            self.set_retention(node, retention)
        if node.page == NO_PAGE:
            self.host.take(node)
            self._settle_on_device(node, page)
            self._tell_moved(node, Tier.DEVICE)
            return True
        if self._pool.reference_counts[node.page] == 0:
            assert node.parent is not None
            self._idle.discard(node)
            self._node_of[node.page] = None
            self._pool.drop(node.page)
            node.parent.device_children -= 1
            self._settle_on_device(node, page)
            return True
        self._pool.retain(node.page)
        return False

    def set_retention(self, node: PageNode, retention: Retention | None) -> None:
        """What a request says about a page it holds; None leaves it as it is."""
        if retention is not None:
            node.priority, node.seconds = retention

    def _settle_on_device(self, node: PageNode, page: int) -> None:
        """A node gets a page that its new owner holds."""
        assert node.parent is not None
        node.page, node.expires_at = page, None
        self._node_of[page] = node
        self._pool.keep((page,))
        node.parent.device_children += 1

    # ---- leaving ----------------------------------------------------------------------------

    def forget(self, nodes: Sequence[PageNode]) -> None:
        """Take pages out that nobody holds and that have no page behind them, the last ones first."""
        for node in reversed(nodes):
            if node.on_device and not node.children and self._pool.references(node.page) == 0:
                self._drop(node)

    def clear(self, wanted: Callable[[Namespace], bool]) -> int:
        """Take whole namespaces out of the tree; returns how many pages. A page somebody holds stays his."""
        removed = 0
        for node in self.tree.take_out(wanted):
            if node.on_device:
                self._idle.discard(node)
                self._node_of[node.page] = None
                self._pool.drop(node.page)
                node.page = NO_PAGE
            else:
                self.host.take(node)
            self._tell_removed((node,))
            removed += 1
        return removed

    def _evict(self, count: int) -> None:
        """Free `count` pages of the device: their contents go to the host, or are lost."""
        self._counts["evicted_pages"] += count
        while count > 0:
            node = self._idle.pop()
            assert node is not None, "every page nobody holds can be evicted"
            if self.host.num_pages:
                self._evict_one(node)
                count -= 1
            else:
                count -= self._drop_path(node, count)

    def _drop_path(self, node: PageNode, most: int) -> int:
        """Take a leaf out of the tree, and the pages before it while they are the next to go: mostly those of
        one request, which were used last at the same time. Returns how many; there is no host tier."""
        references, limit = self._pool.reference_counts, self._idle.first_key()
        nodes, parent, has_turn = [node], node.parent, False
        assert parent is not None
        while parent.page != NO_PAGE and parent.device_children == 1 and not references[parent.page]:
            # One whose retention has an end may come to have another priority: the queue knows.
            in_turn = parent.expires_at is None and (
                limit is None or (parent.priority, parent.last_used) < limit
            )
            if not in_turn or len(nodes) == most:
                has_turn = True
                break
            nodes.append(parent)
            parent = parent.parent
            assert parent is not None
        pages = [n.page for n in nodes]
        for n, page in zip(nodes, pages, strict=True):
            n.page, n.device_children, self._node_of[page] = NO_PAGE, 0, None
        parent.device_children -= 1
        self.tree.remove_path(nodes)
        self._tell_removed(nodes)
        self.evicted += [(n.owner, False) for n in nodes]
        if has_turn:
            self._idle.add(parent)
        self._pool.drop_idle(pages)
        return len(pages)

    def _evict_one(self, node: PageNode) -> None:
        has_place = self.host.can_take(node)
        self.evicted.append((node.owner, has_place))
        if not has_place:
            self._drop(node)
            return
        victim = self.host.victim_for(node)
        if victim is not None:
            self._drop(victim)
        page = self._off_device(node)
        self.copies.append(PageCopy(CopyKind.OFFLOAD, page, self.host.put(node)))
        self._counts["offloaded_pages"] += 1
        self._tell_moved(node, Tier.HOST)

    def _drop(self, node: PageNode) -> None:
        """Out of the tree, with all that is behind it (which is on the host)."""
        order = [node]
        for n in order:
            order.extend(n.children.values())
        for n in reversed(order):
            parent = n.parent
            assert parent is not None
            if n.on_device:
                self._off_device(n)
            else:
                self.host.take(n)
            self.tree.remove(n)
            self._tell_removed((n,))
            self.host.may_leave(parent)

    def _off_device(self, node: PageNode) -> int:
        """Free the node's page; returns which it was."""
        parent = node.parent
        assert parent is not None
        self._idle.discard(node)
        page, node.page = node.page, NO_PAGE
        self._node_of[page] = None
        self._pool.drop(page)
        parent.device_children -= 1
        self._may_leave(parent)
        return page

    def _may_leave(self, node: PageNode) -> None:
        if node.on_device and not node.device_children and self._pool.references(node.page) == 0:
            self._idle.add(node)

    # ---- telling ----------------------------------------------------------------------------

    def _tell_moved(self, node: PageNode, tier: Tier) -> None:
        if self.events.enabled:
            self._tell(EventKind.MOVED, node, (), tier, None)

    def _tell_removed(self, nodes: Sequence[PageNode]) -> None:
        self._counts["removed_pages"] += len(nodes)
        if self.events.enabled:
            for node in nodes:
                self._tell(EventKind.REMOVED, node, (), None, None)

    def _tell(
        self,
        kind: EventKind,
        node: PageNode,
        token_ids: tuple[int, ...],
        tier: Tier | None,
        priority: int | None,
    ) -> None:
        assert node.parent is not None
        name, above = (n.hash_by(self.tree.hash_of) for n in (node, node.parent))
        self.events.emit(kind, name, above, token_ids, tier, priority)
