"""What prefix reuse has done: for one request, and in all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


class RequestCacheStats(NamedTuple):
    """What a request found when it was admitted.

    Attributes:
        cached_tokens: prompt tokens that were not computed again.
        hit_pages, missed_pages: full pages of the prompt that were found, and that were not.
        reused_pages: pages taken from the cache: those found, and a partly matching one.
        onboarded_pages: those of them that came from the host.
        partial_copies: 1 when a partly matching page was copied.
    """

    cached_tokens: int = 0
    hit_pages: int = 0
    missed_pages: int = 0
    onboarded_pages: int = 0
    partial_copies: int = 0

    @property
    def reused_pages(self) -> int:
        return self.hit_pages + self.partial_copies

    @property
    def hit_rate(self) -> float:
        """Share of the prompt's full pages that were found; 0 when it has none."""
        return self.hit_pages / max(self.hit_pages + self.missed_pages, 1)


def count_found(totals: Counter[str], prompt_tokens: int, stats: RequestCacheStats) -> None:
    """Add what a request of so many tokens found to the totals, which are fields of `CacheStats`."""
    totals["requests"] += 1
    totals["prompt_tokens"] += prompt_tokens
    totals["cached_tokens"] += stats.cached_tokens
    totals["hit_pages"] += stats.hit_pages
    totals["missed_pages"] += stats.missed_pages
    totals["reused_pages"] += stats.reused_pages
    totals["partial_copies"] += stats.partial_copies


@dataclass(frozen=True)
class CacheStats:
    """Totals since the start, and what is held now.

    Attributes:
        requests, prompt_tokens, cached_tokens: admitted requests, the tokens of their prompts, and those
            of them that were not computed again (vLLM's prefix_cache_queries and _hits). A request that
            was paused counts again when it goes on, with its output so far as part of its prompt.
        hit_pages … partial_copies: sums over requests, as in RequestCacheStats.
        stored_pages: pages that entered the tree.
        evicted_pages: pages that left the device for want of space: `offloaded_pages` of them to the host.
        removed_pages: pages that left the tree: evicted without a place on the host, evicted from
            the host, cleared, or of a request that failed.
        device_pages, host_pages: in the tree now. pinned_pages: of those on the device.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hit_pages: int = 0
    missed_pages: int = 0
    reused_pages: int = 0
    partial_copies: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    offloaded_pages: int = 0
    onboarded_pages: int = 0
    removed_pages: int = 0
    device_pages: int = 0
    host_pages: int = 0
    pinned_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were not computed again."""
        return self.cached_tokens / max(self.prompt_tokens, 1)
