"""What must hold of a KV cache between any two calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tapeout.runtime.kv_cache import NO_PAGE, KvCache


def check_cache(kv: KvCache) -> None:
    """No page leaked, none free while it is used, counts exact, everything nobody holds can be evicted."""
    pool, cache, slots = kv.pool, kv._cache, range(len(kv.tables))
    owners = Counter(page for slot in slots for page in kv.pages_of(slot))
    owners.update(page for _, page in kv._retired)
    owners.update(page for pin in kv._pins for page in pin.pages)
    assert [pool.references(p) for p in range(kv.num_pages)] == [owners[p] for p in range(kv.num_pages)]
    nodes = list(cache.tree.nodes())
    assert len(nodes) == cache.tree.num_nodes
    on_device = {node.page: node for node in nodes if node.on_device}
    kept = {p for p in range(kv.num_pages) if pool.is_kept(p)}
    assert kept == on_device.keys()
    assert [cache._node_of[p] for p in range(kv.num_pages)] == [on_device.get(p) for p in range(kv.num_pages)]
    blank = set(pool._free)
    assert len(blank) == len(pool._free) == pool.num_blank
    assert blank == {p for p in range(kv.num_pages) if owners[p] == 0 and p not in kept}
    assert pool.num_idle == sum(owners[p] == 0 for p in kept)
    assert pool.num_free == kv.num_pages - sum(1 for n in owners.values() if n)
    assert kv._pages.total == sum(len(kv.pages_of(slot)) for slot in slots)
    for slot in slots:
        pages = kv.pages_of(slot)
        assert len(pages) == len(set(pages))
        assert (kv.tables[slot, len(pages) :] == NO_PAGE).all()
        state: Any = kv._slots[slot]
        if state is not None:
            assert [node.page for node in state.path] == pages[: len(state.path)]
    _check_tree(kv, nodes)


def _check_tree(kv: KvCache, nodes: list[Any]) -> None:
    cache, pool = kv._cache, kv.pool
    host = [node.host_page for node in nodes if not node.on_device]
    assert len(host) == len(set(host)) == cache.host.num_used <= cache.host.num_pages
    assert sorted([*host, *cache.host._free]) == list(range(cache.host.num_pages))
    assert not cache.host._locked
    for node in nodes:
        assert node.on_device != (node.host_page != NO_PAGE), "a page is in one place"
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.on_device or not node.on_device
        if node.on_device and node.parent.parent is not None:
            assert pool.references(node.parent.page) >= pool.references(node.page), (
                "who holds a page holds its path"
            )
        assert node.parent.children[node.key] is node
    for node in [*nodes, *cache.tree._roots.values()]:
        assert node.sorted_keys == (sorted(node.children) if len(node.children) > 1 else [])
        assert node.device_children == sum(child.on_device for child in node.children.values())
    leaves = {n for n in nodes if n.on_device and not n.device_children and pool.references(n.page) == 0}
    assert cache._idle._members == leaves
    assert cache.host._leaves._members == {n for n in nodes if not n.on_device and not n.children}
