"""What passes between the KV cache and those whose pages it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tapeout.runtime.kv_cache.prefix_cache import PrefixMatch
from tapeout.runtime.kv_cache.radix_tree import Namespace, PageNode
from tapeout.runtime.kv_cache.retention import KvCacheRetentionConfig, Retention
from tapeout.runtime.kv_cache.statistics import RequestCacheStats


@dataclass(frozen=True)
class CacheUser:
    """What the cache has to know of a request beside its ids.

    adapter, salt: must be equal for pages to be shared. retention: how long its pages are worth keeping.
    """

    adapter: str | None = None
    salt: str | None = None
    retention: KvCacheRetentionConfig | None = None


@dataclass(slots=True)
class RequestCache:
    """A request's side of the cache.

    stats: what it found when it was first admitted. attached_tokens: tokens that were in the cache when it
    was admitted last.
    """

    user: CacheUser = field(default_factory=CacheUser)
    stats: RequestCacheStats | None = None
    attached_tokens: int = 0

    def attached(self, stats: RequestCacheStats) -> None:
        self.attached_tokens = stats.cached_tokens
        if self.stats is None:
            self.stats = stats

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again; 0 while it waits."""
        return 0 if self.stats is None else self.stats.cached_tokens


class AdmissionPages(NamedTuple):
    """What admitting a request takes from the pool.

    needed: pages it asks for that nobody holds yet. available: pages that are neither held nor
    promised to anybody. match: what `KvCache.attach` takes from the cache.
    """

    needed: int
    available: int
    match: PrefixMatch

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


class PageEvictions(NamedTuple):
    """Cached pages that nobody held left the device to make room.

    pages: for each, the request that had computed it, and whether it went to the host or is lost.
    slots: who got pages at that time, in this number or more.
    """

    pages: list[tuple[str, bool]]
    slots: tuple[int, ...]


@dataclass(eq=False)
class PinnedPrefix:
    """Pages that are not evicted until `KvCache.unpin`. num_tokens: ids they hold."""

    num_tokens: int
    path: tuple[PageNode, ...] = field(repr=False)
    pages: tuple[int, ...] = field(repr=False)


@dataclass(slots=True)
class SlotState:
    """What the prefix cache has of a slot's request.

    owner: id of the request. path: nodes of its first pages, all held. own: those of them that came from
    this request.
    may_store: not after a `clear` that meant it.
    """

    owner: str
    namespace: Namespace
    user: CacheUser
    prompt_tokens: int
    path: list[PageNode]
    own: list[PageNode] = field(default_factory=list)
    may_store: bool = True

    def retentions(self, first_tokens: Sequence[int]) -> Sequence[Retention | None]:
        """What the request says about each of its pages that begin with these tokens."""
        config = self.user.retention
        if config is None:
            return (None,) * len(first_tokens)
        return [config.of_page(first, self.prompt_tokens) for first in first_tokens]
