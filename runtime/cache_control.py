"""The prefix cache of an `LLM` for its users: what it has done, what it holds, and what it should keep."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.runtime.intake import CheckedRequest, Prompt
from tapeout.runtime.kv_cache import CacheEvent, CacheStats, PinnedPrefix
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.turn_lock import TurnLock


class PrefixCacheControl:
    """Use it as `llm.prefix_cache`. Any thread may call.

    Args:
        loop: gives the loop whose cache it is. lock: what guards it.
        compute: runs a prompt so that its pages are cached.
    """

    def __init__(
        self,
        loop: Callable[[], EngineLoop],
        lock: TurnLock,
        compute: Callable[[Prompt], CheckedRequest],
    ) -> None:
        self._loop, self._lock, self._compute = loop, lock, compute

    def stats(self) -> CacheStats:
        """What prefix reuse has done so far, and what is cached now."""
        with self._lock:
            return self._loop().kv_cache.stats()

    def events(self, since: int = 0) -> list[CacheEvent]:
        """Changes from event `since` on, oldest first; see kv_cache/events.py.

        Ask again with the last `event_id` + 1. Where the first id is higher than asked for, those between
        are lost: more came than `event_buffer_max_size`.
        """
        with self._lock:
            return self._loop().kv_cache.events.since(since)

    def pin(self, prompt: Prompt) -> PinnedPrefix:
        """Compute a prompt and keep its full pages on the device until `unpin`.

        Raises:
            UsageError: it can never run, has no full page, or too few pages would be left for requests.
        """
        with self._lock:
            checked, loop = self._compute(prompt), self._loop()
            available = loop.capacity.available_pages(loop.running, loop.kv_cache)
            return loop.kv_cache.pin(checked.prompt_token_ids, checked.cache_user, available)

    def unpin(self, pin: PinnedPrefix) -> None:
        """Let go of a pinned prefix: its pages may be evicted like any others from now on."""
        with self._lock:
            self._loop().kv_cache.unpin(pin)

    def clear(self, *, cache_salt: str | None = None) -> int:
        """Forget cached pages, of a salt or all of them; returns how many. Pins of them end.

        Running requests go on, and leave nothing of what they have to the cache.
        """
        with self._lock:
            return self._loop().kv_cache.clear(salt=cache_salt)
