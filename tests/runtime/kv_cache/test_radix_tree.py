"""Finding prefixes: against a plain list of sequences, and with hashes that are all equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.runtime.kv_cache import NO_PAGE, CacheUser, KvCache, PrefixCacheOptions, radix_tree
from tapeout.runtime.kv_cache.radix_tree import Namespace, PageNode, RadixTree

PER_PAGE = 3
IDS = st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=10)
NAMESPACE = Namespace("w")


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def put(tree: RadixTree, namespace: Namespace, ids: list[int]) -> None:
    parent = tree.root(namespace)
    for start in range(0, len(ids) // PER_PAGE * PER_PAGE, PER_PAGE):
        key = np.array(ids[start : start + PER_PAGE], np.int32).tobytes()
        parent = tree.child(parent, key) or tree.insert(parent, key, page=start)


@given(stored=st.lists(IDS, max_size=8), wanted=IDS, less=st.integers(0, 2))
def test_the_longest_prefix_is_found(stored: list[list[int]], wanted: list[int], less: int) -> None:
    tree, most = RadixTree(PER_PAGE), max(len(wanted) - less, 0)
    for ids in stored:
        put(tree, NAMESPACE, ids)
    full = [ids[: len(ids) // PER_PAGE * PER_PAGE] for ids in stored]
    best = max((min(shared(ids, wanted), most) for ids in full), default=0)
    array = np.array(wanted, np.int32)
    path = tree.find(NAMESPACE, array, most)
    assert len(path) == best // PER_PAGE
    assert [i for node in path for i in node.token_ids] == wanted[: len(path) * PER_PAGE]
    partial = tree.find_partial(NAMESPACE, path, array, most)
    assert (0 if partial is None else partial.num_tokens) == best % PER_PAGE
    if partial is not None:
        assert partial.node.parent is (path[-1] if path else tree.root(NAMESPACE))
        assert list(partial.node.token_ids[: partial.num_tokens]) == wanted[len(path) * PER_PAGE : best]
    assert tree.find(NAMESPACE._replace(salt="x"), array, most) == []


@given(before=st.lists(IDS, max_size=6), after=st.lists(IDS, max_size=6), wanted=IDS, data=st.data())
def test_a_search_goes_on_where_it_ended(
    before: list[list[int]], after: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    """Pages have come and gone since."""
    tree, array = RadixTree(PER_PAGE), np.array(wanted, np.int32)
    for ids in [*before, wanted]:
        put(tree, NAMESPACE, ids)
    known = tree.find(NAMESPACE, array, len(wanted))
    was_known = list(known)
    leaves = [node for node in tree.nodes() if not node.children]
    for node in data.draw(st.lists(st.sampled_from(leaves), unique=True)) if leaves else []:
        path = [node]
        while len(path[-1].parent.children) == 1 and path[-1].parent.parent and data.draw(st.booleans()):
            path.append(path[-1].parent)
        for gone in path:
            gone.page = NO_PAGE
        count = tree.num_nodes
        tree.remove_path(path)
        assert tree.num_nodes == count - len(path) == len(list(tree.nodes()))
    for ids in after:
        put(tree, NAMESPACE, ids)
    assert tree.find(NAMESPACE, array, len(wanted), known) == tree.find(NAMESPACE, array, len(wanted))
    assert known == was_known, "what was found belongs to whoever asked"


@given(stored=st.lists(IDS, max_size=4), ids=IDS.filter(lambda ids: len(ids) >= PER_PAGE))
def test_a_path_enters_as_its_pages_would_one_by_one(stored: list[list[int]], ids: list[int]) -> None:
    one_by_one, together = RadixTree(PER_PAGE), RadixTree(PER_PAGE)
    for tree in (one_by_one, together):
        for other in stored:
            put(tree, NAMESPACE, other)
    put(one_by_one, NAMESPACE, ids)
    known = together.find(NAMESPACE, np.array(ids, np.int32), len(ids))
    starts = range(len(known) * PER_PAGE, len(ids) // PER_PAGE * PER_PAGE, PER_PAGE)
    if starts:
        parent = known[-1] if known else together.root(NAMESPACE)
        keys = [np.array(ids[start : start + PER_PAGE], np.int32).tobytes() for start in starts]
        together.insert_path(parent, keys, list(starts))
    assert shape(one_by_one.root(NAMESPACE)) == shape(together.root(NAMESPACE))
    assert one_by_one.num_nodes == together.num_nodes


def shape(node: PageNode) -> Any:
    """All that a tree is below a node."""
    below = {key: shape(child) for key, child in node.children.items()}
    return node.key, node.page, node.device_children, node.sorted_keys, below


@given(stored=st.lists(st.tuples(st.sampled_from("ab"), IDS), max_size=8))
def test_what_is_taken_out_leaves_nothing(stored: list[tuple[str, list[int]]]) -> None:
    tree = RadixTree(PER_PAGE)
    for salt, ids in stored:
        put(tree, Namespace("w", None, salt), ids)
    count = tree.num_nodes
    gone = list(tree.take_out(lambda n: n.salt == "a"))
    assert all(n.parent is not None and not n.children for n in gone)
    assert tree.num_nodes == count - len(gone) == len(list(tree.nodes()))
    for node in reversed(list(tree.nodes())):
        tree.remove(node)
    assert tree.num_nodes == 0
    assert all(not root.children for root in tree._roots.values())
    assert tree._roots.keys() == set(tree._namespaces.values())


class CollidingKey(bytes):
    """Token ids whose hashes are all equal."""

    def __hash__(self) -> int:
        return 7


def test_equal_hashes_are_not_equal_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of keys nor those that events tell."""
    monkeypatch.setattr(radix_tree, "PageKey", CollidingKey)
    options = PrefixCacheOptions(event_buffer_max_size=9)
    kv = KvCache(
        num_pages=8, tokens_per_page=PER_PAGE, num_slots=1, max_seq_len=9, options=options,
        hash_of=lambda key, parent: 7,
    )  # fmt: skip

    def cached(ids: list[int]) -> int:
        array = np.array([*ids, 5], np.int32)
        return kv.attach(0, array, CacheUser(), kv.ask(array, CacheUser(), 3, 8).match).cached_tokens

    for ids, expected in (
        ([1, 2, 3], 0),
        ([4, 2, 3], 0),
        ([1, 2, 3], 3),
        ([4, 2, 3], 3),
        ([1, 2, 4], 2),
        ([2, 2, 3], 0),
    ):
        assert cached(ids) == expected
        kv.grow(np.array([0]), np.array([3]))
        kv.store(0, 3, lambda start, end, ids=ids: np.array(ids[start:end], np.int32), -1)
        kv.free(0)
    assert {event.page_hash for event in kv.events.since(0)} == {7}
    assert kv.stats().device_pages == 4
