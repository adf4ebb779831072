"""What happens to cached pages, told to others: a router that sends a prompt where its prefix is.

A page is named by its hash: XXH3-64 of its token ids as little-endian int32, seeded with the hash of the
page before it; the first page's seed, told as its `parent_hash`, is XXH3-64 of the namespace. So whoever
knows a namespace's seed (from any event of a first page) can name the pages of a prompt and follow them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where a page is."""

    DEVICE = "device"
    HOST = "host"


class EventKind(StrEnum):
    STORED = "stored"  #: a page entered the cache, on `tier`
    MOVED = "moved"  #: a page is now on `tier` instead of the other
    REMOVED = "removed"  #: a page is nowhere any more


@dataclass(frozen=True)
class CacheEvent:
    """One change.

    Attributes:
        event_id: counts up by one from 0; a gap means that the buffer has overflowed.
        page_hash, parent_hash: see the module.
        token_ids: of a stored page, else empty.
        tier: where the page is now; None when it was removed.
        priority: retention priority of a stored page, else None.
    """

    event_id: int
    kind: EventKind
    page_hash: int
    parent_hash: int
    token_ids: tuple[int, ...] = ()
    tier: Tier | None = None
    priority: int | None = None


class EventBuffer:
    """The newest `max_events` events; 0 keeps and costs nothing."""

    def __init__(self, max_events: int) -> None:
        self.enabled = max_events > 0
        self._events: deque[CacheEvent] = deque(maxlen=max_events)
        self._next = 0

    @property
    def next_id(self) -> int:
        """Id of the event that comes next."""
        return self._next

    def emit(
        self,
        kind: EventKind,
        page_hash: int,
        parent_hash: int,
        token_ids: tuple[int, ...] = (),
        tier: Tier | None = None,
        priority: int | None = None,
    ) -> None:
        self._events.append(CacheEvent(self._next, kind, page_hash, parent_hash, token_ids, tier, priority))
        self._next += 1

    def since(self, event_id: int) -> list[CacheEvent]:
        """Events with this id and later, oldest first. When the first of them has a higher id, those between
        are lost, and a follower has to start over from a cleared view."""
        skip = max(event_id - (self._next - len(self._events)), 0)
        return [e for i, e in enumerate(self._events) if i >= skip]
