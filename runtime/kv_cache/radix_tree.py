"""The radix tree over full pages: which sequences of token ids have their K and V in some page.

A node is one full page. Its key under its parent is the page's token ids themselves, as bytes: a
dictionary may hash them to find a candidate but compares them before it answers, so two pages whose
hashes are equal are never taken for each other. What a page holds depends on all ids before it and on
the namespace, hence the path from the namespace's root. The 64-bit `hash` of a node is a name for
others (see events.py) and is never used to find one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from tapeout.runtime.kv_cache.pages import NO_PAGE
from tapeout.runtime.kv_cache.retention import DEFAULT_PRIORITY

#: Type of the keys. A test puts one in its place whose hashes are all equal.
PageKey: type[bytes] = bytes
PageHash = Callable[[bytes, int], int]  # token ids as bytes, the parent's hash -> hash

_ID_BYTES = 4


class Namespace(NamedTuple):
    """What must be equal beside token ids for a page to be reused.

    adapter: name of the adapter the request runs with, None without one. salt: the user's cache_salt.
    weights: digest of the weights that computed the page.
    """

    weights: str = ""
    adapter: str | None = None
    salt: str | None = None


@dataclass(slots=True, eq=False)
class PageNode:
    """A full page in the tree, or the root of a namespace.

    Attributes:
        key: its token ids as int32 bytes. hash: see the module.
        page, host_page: where its contents are: on the device, or on the host. Both NO_PAGE: removed.
        priority, seconds: retention. expires_at: when the priority lapses, None = never or in use.
        last_used: counts up with every use; smaller is older.
        device_children: children on the device: with any of them it cannot leave the device.
        stamp: changes with every place in an eviction queue, so that entries of old places are known.
    """

    key: bytes
    parent: PageNode | None
    hash: int
    page: int = NO_PAGE
    host_page: int = NO_PAGE
    priority: int = DEFAULT_PRIORITY
    seconds: float | None = None
    expires_at: float | None = None
    last_used: int = 0
    device_children: int = 0
    stamp: int = 0
    children: dict[bytes, PageNode] = field(default_factory=dict)
    sorted_keys: list[bytes] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.key, np.int32).tolist())

    @property
    def on_device(self) -> bool:
        return self.page != NO_PAGE

    @property
    def removed(self) -> bool:
        return self.page == NO_PAGE and self.host_page == NO_PAGE and self.parent is not None


class PartialMatch(NamedTuple):
    """A page whose first `num_tokens` ids are those wanted."""

    node: PageNode
    num_tokens: int


def page_hash(key: bytes, parent_hash: int) -> int:
    """XXH3-64 of the page's int32 ids, seeded with the parent's hash."""
    return xxhash.xxh3_64_intdigest(key, parent_hash)


class RadixTree:
    """Nodes by namespace and token ids. Knows nothing of pools, references or eviction."""

    def __init__(self, tokens_per_page: int, hash_of: PageHash = page_hash) -> None:
        self._page_bytes = tokens_per_page * _ID_BYTES
        self._hash_of = hash_of
        self._roots: dict[Namespace, PageNode] = {}
        self._namespaces: dict[PageNode, Namespace] = {}  # of roots
        self.num_nodes = 0

    def root(self, namespace: Namespace) -> PageNode:
        """The root of a namespace; made when it is new."""
        root = self._roots.get(namespace)
        if root is None:
            root = PageNode(b"", None, self._hash_of(repr(tuple(namespace)).encode(), 0))
            self._roots[namespace], self._namespaces[root] = root, namespace
        return root

    def find(self, namespace: Namespace, token_ids: np.ndarray, max_tokens: int) -> list[PageNode]:
        """The longest path of full pages that hold the first ids, at most `max_tokens` of them.

        token_ids: int32 [n].
        """
        path: list[PageNode] = []
        node = self._roots.get(namespace)
        if node is None:
            return path
        data, step = _as_bytes(token_ids), self._page_bytes
        for start in range(0, max_tokens * _ID_BYTES // step * step, step):
            node = node.children.get(PageKey(data[start : start + step]))
            if node is None:
                break
            path.append(node)
        return path

    def find_partial(
        self, namespace: Namespace, path: list[PageNode], token_ids: np.ndarray, max_tokens: int
    ) -> PartialMatch | None:
        """Below `path`, the page that shares most first ids with what follows; None when none shares any."""
        parent = path[-1] if path else self._roots.get(namespace)
        if parent is None or not parent.sorted_keys:
            return None
        start = len(path) * self._page_bytes
        wanted = _as_bytes(token_ids)[start : min(start + self._page_bytes, max_tokens * _ID_BYTES)]
        # In the order of bytes, what shares the longest beginning with a key stands next to its place.
        place = bisect.bisect_left(parent.sorted_keys, wanted)
        best, shared = None, 0
        for key in parent.sorted_keys[max(place - 1, 0) : place + 1]:
            common = _shared_ids(key, wanted)
            if common > shared:
                best, shared = key, common
        return None if best is None else PartialMatch(parent.children[best], shared)

    def child(self, parent: PageNode, key: bytes) -> PageNode | None:
        return parent.children.get(PageKey(key))

    def insert(self, parent: PageNode, key: bytes, page: int) -> PageNode:
        """A new page on the device; `key` is not among the parent's children."""
        key = PageKey(key)
        node = PageNode(key, parent, self._hash_of(key, parent.hash), page)
        parent.children[key] = node
        bisect.insort(parent.sorted_keys, key)
        parent.device_children += 1
        self.num_nodes += 1
        return node

    def remove(self, node: PageNode) -> None:
        """Take a leaf out; the caller has given up its pages."""
        parent = node.parent
        assert parent is not None, "a root is not removed"
        assert not node.children, "a page with pages behind it cannot go"
        del parent.children[node.key]
        del parent.sorted_keys[bisect.bisect_left(parent.sorted_keys, node.key)]
        self.num_nodes -= 1
        if parent.parent is None and not parent.children:
            # An empty root goes, so that salts that come and go leave nothing.
            del self._roots[self._namespaces.pop(parent)]

    def take_out(self, wanted: Callable[[Namespace], bool]) -> Iterator[PageNode]:
        """Remove whole namespaces; yields their nodes, children before parents."""
        for namespace in [n for n in self._roots if wanted(n)]:
            root = self._roots.pop(namespace)
            del self._namespaces[root]
            order = [root]
            for node in order:
                order.extend(node.children.values())
            for node in reversed(order[1:]):
                node.children, node.sorted_keys, node.device_children = {}, [], 0
                self.num_nodes -= 1
                yield node

    def nodes(self) -> Iterator[PageNode]:
        """All pages, parents before children."""
        order = list(self._roots.values())
        for node in order:
            order.extend(node.children.values())
            if node.parent is not None:
                yield node


def _shared_ids(key: bytes, wanted: bytes) -> int:
    """How many ids two pages, of which the second may be shorter, begin with in common."""
    count = len(wanted) // _ID_BYTES
    differ = np.flatnonzero(np.frombuffer(key, np.int32, count) != np.frombuffer(wanted, np.int32))
    return int(differ[0]) if len(differ) else count


def _as_bytes(token_ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(token_ids, np.int32).tobytes()
