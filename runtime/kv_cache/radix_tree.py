"""The radix tree over full pages: which sequences of token ids have their K and V in some page.

A node is one full page. Its key under its parent is the page's token ids themselves, as bytes: a
dictionary may hash them to find a candidate but compares them before it answers, so two pages whose
hashes are equal are never taken for each other. What a page holds depends on all ids before it and on
the namespace, hence the path from the namespace's root. The 64-bit hash of a node is a name for others
(see events.py) and is never used to find one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from tapeout.runtime.kv_cache.pages import NO_PAGE
from tapeout.runtime.kv_cache.retention import DEFAULT_PRIORITY

#: Type of the keys. A test puts one in its place whose hashes are all equal.
PageKey: type[bytes] = bytes
PageHash = Callable[[bytes, int], int]  # token ids as bytes, the parent's hash -> hash
EvictionKey = tuple[int, int]  # priority, last use: the smaller one goes first

_ID_BYTES = 4


class Namespace(NamedTuple):
    """What must be equal beside token ids for a page to be reused.

    adapter: name of the adapter the request runs with, None without one. salt: the user's cache_salt.
    weights: digest of the weights that computed the page.
    """

    weights: str = ""
    adapter: str | None = None
    salt: str | None = None


class PageNode:
    """A full page in the tree, or the root of a namespace.

    Written out and not a dataclass, with what leaves do not have made on demand: pages come by the
    million, and every container of each would be work for the garbage collector.

    Attributes:
        key: its token ids as int32 bytes. owner: the request that computed it.
        page, host_page: where its contents are: on the device, or on the host. Both NO_PAGE: removed.
        priority, seconds: retention. expires_at: when the priority lapses, None = never or in use.
        last_used: counts up with every use; smaller is older.
        device_children: children on the device: with any of them it cannot leave the device.
        stamp: changes with every place in an eviction queue, so that entries of old places are known.
        children: by key. sorted_keys: theirs, in the order of bytes, where it has several: most have one.
    """

    __slots__ = (
        "_hash", "children", "device_children", "expires_at", "host_page", "key", "last_used", "owner",
        "page", "parent", "priority", "seconds", "sorted_keys", "stamp",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: PageNode | None, page: int = NO_PAGE) -> None:
        self.key, self.parent, self.page = key, parent, page
        self.host_page, self.owner = NO_PAGE, ""
        self.priority = DEFAULT_PRIORITY
        self.seconds: float | None = None
        self.expires_at: float | None = None
        self.last_used = self.device_children = self.stamp = 0
        self.children: dict[bytes, PageNode] = _NO_CHILDREN
        self.sorted_keys: list[bytes] = _NO_KEYS
        self._hash: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.key, np.int32).tolist())

    @property
    def eviction_key(self) -> EvictionKey:
        return self.priority, self.last_used

    @property
    def on_device(self) -> bool:
        return self.page != NO_PAGE

    @property
    def removed(self) -> bool:
        return self.page == NO_PAGE and self.host_page == NO_PAGE and self.parent is not None

    def hash_by(self, hash_of: PageHash) -> int:
        """Its name for others; see the module."""
        if self._hash is None:
            nodes = [self]
            while nodes[-1]._hash is None and (above := nodes[-1].parent) is not None:
                nodes.append(above)
            for node in reversed(nodes):
                if node._hash is None:
                    node._hash = hash_of(node.key, 0 if node.parent is None else node.parent._hash or 0)
        assert self._hash is not None
        return self._hash


# Of nodes without children, or without several; nobody writes to them.
_NO_CHILDREN: dict[bytes, PageNode] = {}
_NO_KEYS: list[bytes] = []


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
        self.hash_of = hash_of
        self._roots: dict[Namespace, PageNode] = {}
        self._namespaces: dict[PageNode, Namespace] = {}  # of roots
        self.num_nodes = 0

    def root(self, namespace: Namespace) -> PageNode:
        """The root of a namespace; made when it is new."""
        root = self._roots.get(namespace)
        if root is None:
            root = PageNode(repr(tuple(namespace)).encode(), None)
            self._roots[namespace], self._namespaces[root] = root, namespace
        return root

    def find(
        self, namespace: Namespace, token_ids: np.ndarray, max_tokens: int, known: Sequence[PageNode] = ()
    ) -> list[PageNode]:
        """The longest path of full pages that hold the first ids, at most `max_tokens` of them.

        Args:
            token_ids: int32 [n].
            known: what an earlier search for the same ids found: only what is new of it is looked up.
        """
        path = list(known)
        while path and path[-1].removed:  # a page goes after those behind it
            path.pop()
        node = path[-1] if path else self._roots.get(namespace)
        step = self._page_bytes
        first, end = len(path) * step, max_tokens * _ID_BYTES // step * step
        if node is None or not node.children or first >= end:
            return path
        # Not copied: a long prompt of which nothing is cached costs no more than a short one.
        data = np.ascontiguousarray(token_ids, np.int32).data.cast("B")
        for start in range(first, end, step):
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
        size = self._page_bytes // _ID_BYTES
        first = len(path) * size
        if parent is None or not parent.children or first >= max_tokens:
            return None
        wanted = np.ascontiguousarray(token_ids[first : min(first + size, max_tokens)], np.int32).tobytes()
        # In the order of bytes, what shares the longest beginning with a key stands next to its place.
        keys = parent.sorted_keys or list(parent.children)
        place = bisect.bisect_left(keys, wanted)
        best, shared = None, 0
        for key in keys[max(place - 1, 0) : place + 1]:
            common = _shared_ids(key, wanted)
            if common > shared:
                best, shared = key, common
        return None if best is None else PartialMatch(parent.children[best], shared)

    def child(self, parent: PageNode, key: bytes) -> PageNode | None:
        return parent.children.get(PageKey(key))

    def insert(self, parent: PageNode, key: bytes, page: int) -> PageNode:
        """A new page on the device; `key` is not among the parent's children."""
        key = PageKey(key)
        node = PageNode(key, parent, page)
        if not parent.children:
            parent.children = {key: node}
        else:
            if not parent.sorted_keys:
                parent.sorted_keys = list(parent.children)
            parent.children[key] = node
            bisect.insort(parent.sorted_keys, key)
        parent.device_children += 1
        self.num_nodes += 1
        return node

    def insert_path(self, parent: PageNode, keys: Sequence[bytes], pages: Sequence[int]) -> list[PageNode]:
        """New pages on the device, the first one as in `insert` and each of the others behind the one before
        it; there is at least one."""
        node = self.insert(parent, keys[0], pages[0])
        nodes = [node]
        for key, page in zip(keys[1:], pages[1:], strict=True):
            key, parent = PageKey(key), node
            node = PageNode(key, parent, page)
            parent.children, parent.device_children = {key: node}, 1
            nodes.append(node)
        self.num_nodes += len(nodes) - 1
        return nodes

    def remove(self, node: PageNode) -> None:
        """Take a leaf out; the caller has given up its pages."""
        parent = node.parent
        assert parent is not None, "a root is not removed"
        assert not node.children, "a page with pages behind it cannot go"
        if len(parent.children) == 1:
            assert node.key in parent.children, "a page is removed once"
            parent.children = _NO_CHILDREN
        else:
            del parent.children[node.key]
            if len(parent.children) == 1:
                parent.sorted_keys = _NO_KEYS
            else:
                del parent.sorted_keys[bisect.bisect_left(parent.sorted_keys, node.key)]
        self.num_nodes -= 1
        if parent.parent is None and not parent.children and parent in self._namespaces:
            # An empty root goes, so that salts that come and go leave nothing.
            del self._roots[self._namespaces.pop(parent)]

    def remove_path(self, nodes: Sequence[PageNode]) -> None:
        """Take out a leaf and pages before it, each the parent of the one before it in `nodes` and with no
        other page behind it; the caller has given up their pages."""
        for node in nodes[1:]:
            assert len(node.children) == 1, "a page with pages behind it cannot go"
            node.children = _NO_CHILDREN
        self.num_nodes -= len(nodes) - 1
        self.remove(nodes[-1])

    def take_out(self, wanted: Callable[[Namespace], bool]) -> Iterator[PageNode]:
        """Remove whole namespaces; yields their nodes, children before parents."""
        for namespace in [n for n in self._roots if wanted(n)]:
            root = self._roots.pop(namespace)
            del self._namespaces[root]
            order = [root]
            for node in order:
                order.extend(node.children.values())
            for node in reversed(order[1:]):
                node.children, node.sorted_keys, node.device_children = _NO_CHILDREN, _NO_KEYS, 0
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
    # As numbers, the first byte is the lowest: the lowest bit that differs tells where they part.
    differ = int.from_bytes(key[: len(wanted)], "little") ^ int.from_bytes(wanted, "little")
    if differ == 0:
        return len(wanted) // _ID_BYTES
    return ((differ & -differ).bit_length() - 1) // (8 * _ID_BYTES)
