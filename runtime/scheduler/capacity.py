"""The capacity scheduler: which waiting requests may hold a slot and pages."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tapeout.runtime.kv_cache import AdmissionPages, KvCache, pages_for
from tapeout.runtime.scheduler.policies import CapacityPolicy
from tapeout.runtime.scheduler.queue import WaitingQueue
from tapeout.runtime.scheduler.request import Request
from tapeout.runtime.scheduler.running import Running

_NEED = {
    CapacityPolicy.GUARANTEED_NO_EVICT: ("worst case", "uncommitted"),
    CapacityPolicy.MAX_UTILIZATION: ("present need", "free beyond the present need of those that run"),
    CapacityPolicy.STATIC_BATCH: ("worst case", "uncommitted"),
}


class Admission(NamedTuple):
    """A request was given a slot.

    Attributes:
        pages: what admission reckoned with: its worst case, or under MAX_UTILIZATION its present need,
            without pages of the prefix cache that others hold anyway.
        available_pages: what there was to reckon with.
        cached_tokens: of its context, which the prefix cache had.
        recompute_tokens: tokens that were in the KV cache when it was paused and were not found in the
            prefix cache; 0 for one that is new.
    """

    request_id: str
    slot: int
    pages: int
    available_pages: int
    policy: CapacityPolicy
    resumed: bool = False
    cached_tokens: int = 0
    recompute_tokens: int = 0

    def reason(self) -> str:
        need, of = _NEED[self.policy]
        text = f"{need} {self.pages} of {self.available_pages} pages {of}"
        if self.cached_tokens:
            text += f"; {self.cached_tokens} tokens are cached"
        if self.resumed:
            return f"resumed: {text}; {self.recompute_tokens} tokens are computed again"
        return f"admitted: {text}"


class HoldCause(StrEnum):
    SLOTS = "max_batch_size"
    PAGES = "kv_cache_pages"
    BATCH = "static_batch"
    WEIGHTS = "weights"


class Held(NamedTuple):
    """The head of the queue was not admitted. Those behind it wait for their turn.

    `needed` and `available` are slots, pages, or (BATCH, WEIGHTS) the requests that still hold a slot and 0.
    """

    request_id: str
    cause: HoldCause
    needed: int
    available: int
    policy: CapacityPolicy
    paused: bool = False

    def reason(self) -> str:
        state = "paused" if self.paused else "waiting"
        if self.cause is HoldCause.SLOTS:
            return f"{state}: max_batch_size is reached, all {self.needed} slots are taken"
        if self.cause is HoldCause.WEIGHTS:
            return f"{state}: the engine gets other weights, as soon as nobody runs"
        if self.cause is HoldCause.BATCH:
            return f"{state}: static batch, {self.needed} requests of the batch before still run"
        need, of = _NEED[self.policy]
        return f"{state}: {need} {self.needed} pages, {self.available} {of}"


class CapacityScheduler:
    """Slots and pages for waiting requests, in the order of their ranks.

    The queue's head is never overtaken, so every request is admitted once those before it have ended.
    Cost: the requests admitted, plus one; under MAX_UTILIZATION also a few array operations over those
    that run. It never depends on the queue's length.

    What a request must find (see `CapacityPolicy`):
        worst case: pages for prompt and `max_tokens`. They are committed until it is released, and pages
            never run out. A page that several share counts once, so the sum may exceed the pool.
        present need: pages for its context and a page's worth of tokens more, but never more than the
            worst case; free beyond the same need of every running request. So after an admission
            nobody has to be paused for at least `tokens_per_page` steps.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        tokens_per_page: int,
        max_batch_size: int,
        policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
    ) -> None:
        self.policy = policy
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self._page_tokens = np.array(tokens_per_page, np.int32)
        self.max_batch_size = max_batch_size
        self.committed_pages = 0
        self._free_slots = list(range(max_batch_size - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def may_pause(self) -> bool:
        """Whether running requests can find no page for their next token."""
        return self.policy is CapacityPolicy.MAX_UTILIZATION

    def worst_case_pages(self, request: Request) -> int:
        return pages_for(request.worst_case_tokens, self.tokens_per_page)

    def refusal(self, request: Request) -> str | None:
        """Why the request can never run; None when it can, alone at the latest."""
        pages = self.worst_case_pages(request)
        if pages <= self.num_pages:
            return None
        tokens = f"{request.prompt_tokens} prompt tokens and {request.max_tokens} to generate"
        size = f"{pages} KV pages of {self.tokens_per_page} tokens"
        return f"{tokens} need {size}; the pool has {self.num_pages}"

    def admit(
        self, waiting: WaitingQueue, running: Running, kv_cache: KvCache, *, is_heard: bool = True
    ) -> tuple[list[tuple[Request, Admission]], Held | None]:
        """Take requests from the front of `waiting` while they fit.

        A page of the prefix cache that others hold costs a request nothing; those that nobody holds count
        as free until it takes them, which it does here.

        Returns the admitted ones, whose `slot` is set, and why the next one is not among them; None in place
        of the reason where nobody hears it (`is_heard`) and finding it would take a search.
        """
        admitted: list[tuple[Request, Admission]] = []
        request = waiting.first()
        if request is None:
            return admitted, None
        taken = self.max_batch_size - len(self._free_slots)
        if self.policy is CapacityPolicy.STATIC_BATCH and taken:
            return admitted, self._held(request, HoldCause.BATCH, taken, 0)
        available: int | None = None
        while request is not None:
            if not self._free_slots:
                return admitted, self._held(request, HoldCause.SLOTS, self.max_batch_size, 0)
            if available is None:
                # Without a free page nobody is admitted, whatever those that run still need.
                has_free = kv_cache.num_free > 0
                if not has_free and not is_heard:
                    return admitted, None
                available = self.available_pages(running, kv_cache) if has_free else 0
            ids, cache = request.context_token_ids, request.cache
            pages = kv_cache.ask(ids, cache.user, self._needed_pages(request), available)
            if not pages.fits:
                return admitted, self._held(request, HoldCause.PAGES, pages.needed, max(available, 0))
            waiting.remove(request.request_id)
            request.slot = self._free_slots.pop()
            self.committed_pages += self.worst_case_pages(request)
            # At once: what the next one finds may be what this one holds now.
            cache.attached(
                kv_cache.attach(
                    request.slot, ids, cache.user, pages.match, request.prompt_tokens, request.request_id
                )
            )
            admitted.append((request, self._admission(request, pages)))
            # Whatever of it was taken already, and whatever is still to come.
            available -= pages.needed
            request = waiting.first()
        return admitted, None

    def held_for_weights(self, waiting: WaitingQueue) -> Held | None:
        """Why nobody is admitted while weights are to change."""
        first, taken = waiting.first(), self.max_batch_size - len(self._free_slots)
        return None if first is None else self._held(first, HoldCause.WEIGHTS, taken, 0)

    def release(self, request: Request) -> None:
        """Take back the slot, and what was committed, of a request that no submitted step uses any more."""
        self.committed_pages -= self.worst_case_pages(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _needed_pages(self, request: Request) -> int:
        tokens = request.worst_case_tokens
        if self.may_pause:
            tokens = min(request.context_tokens + self.tokens_per_page, tokens)
        return pages_for(tokens, self.tokens_per_page)

    def available_pages(self, running: Running, kv_cache: KvCache) -> int:
        """Pages that nobody holds and none of those that run is to find free; below 0 where they may have
        to be paused."""
        if not self.may_pause:
            return kv_cache.uncommitted_pages(self.committed_pages)
        # Of all slots, whoever has them: what runs is picked out at the end, once.
        tokens = np.maximum(running.context_tokens, running.cached_tokens)
        tokens += self._page_tokens
        np.minimum(tokens, running.worst_case_tokens, out=tokens)
        missing = kv_cache.missing_pages(tokens)[running.order]
        return kv_cache.num_free - int(missing.sum(dtype=np.int32))

    def _admission(self, request: Request, pages: AdmissionPages) -> Admission:
        found = request.cache.attached_tokens
        return Admission(
            request.request_id,
            request.slot,
            pages.needed,
            pages.available,
            self.policy,
            resumed=request.pauses > 0,
            cached_tokens=found,
            recompute_tokens=max(request.lost_tokens - found, 0),
        )

    def _held(self, request: Request, cause: HoldCause, needed: int, available: int) -> Held:
        return Held(request.request_id, cause, needed, available, self.policy, request.pauses > 0)
