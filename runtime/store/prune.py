"""Removing what no tag of a store needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.store.address import SetAddress
from tapeout.runtime.store.remote import open_store
from tapeout.runtime.store.transfer import Tell, silent


@dataclass(frozen=True)
class Pruned:
    files: int
    size_bytes: int


def prune_store(address: SetAddress, tell: Tell = silent) -> Pruned:
    """Remove blobs that no set needs which a tag points at, and what pushes that were killed left.

    A push under way has blobs that no tag needs yet: the caller knows that there is none.

    Raises:
        EngineError: a tag or an index cannot be read; nothing is removed then.
        TapeoutError: the store failed.
    """
    store = open_store(address)
    store.check_writable()
    needed: set[str] = set()
    tags = store.tags()
    if not tags:
        raise TapeoutError(
            f"{address.shown} lists no tags: nothing is removed where nothing says what is needed"
        )
    for tag in tags:
        stored = open_store(replace(address, tag=tag)).read_set()
        needed |= {sha256 for _, sha256 in stored.index.files().values()}
        needed.add(hashlib.sha256(stored.index_bytes).hexdigest())
    files = size_bytes = 0
    for path, info in store.blobs().items():
        if path.rsplit("/", 1)[-1] not in needed:
            tell(f"removing {path}")
            store.remove(path)
            files, size_bytes = files + 1, size_bytes + int(info.get("size") or 0)
    return Pruned(files, size_bytes)
