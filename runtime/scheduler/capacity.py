"""The capacity scheduler: which waiting requests may hold a slot and pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tapeout.runtime.kv_cache import KvCache, pages_for
from tapeout.runtime.scheduler.request import Request


class CapacityPolicy(StrEnum):
    """How admission treats the pages a request may come to need."""

    #: Admit when the worst case fits: no running request is ever evicted or paused.
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"


@dataclass(frozen=True)
class Admission:
    """A request was given a slot; `pages` is its worst case, committed until it is released."""

    request_id: str
    slot: int
    pages: int
    uncommitted_pages: int

    def reason(self) -> str:
        return f"admitted: worst case {self.pages} of {self.uncommitted_pages} uncommitted pages"


class WaitCause(StrEnum):
    SLOTS = "max_batch_size"
    PAGES = "kv_cache_pages"


@dataclass(frozen=True)
class Waiting:
    """The head of the queue was not admitted. Those behind it wait for their turn."""

    request_id: str
    cause: WaitCause
    needed: int
    available: int

    def reason(self) -> str:
        if self.cause is WaitCause.SLOTS:
            return f"waiting: all {self.needed} slots (max_batch_size) are taken"
        return f"waiting: worst case {self.needed} pages, {self.available} uncommitted"


class CapacityScheduler:
    """GUARANTEED_NO_EVICT over slots and pages, first come first served.

    A request commits the pages of its worst case when admitted, and page use of running requests
    never exceeds what is committed. The queue's head is never overtaken, so every request is
    admitted once those before it have ended. Cost: the requests admitted, plus one.
    """

    policy = CapacityPolicy.GUARANTEED_NO_EVICT

    def __init__(self, *, num_pages: int, tokens_per_page: int, max_batch_size: int) -> None:
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self.max_batch_size = max_batch_size
        self.committed_pages = 0
        self._free_slots = list(range(max_batch_size - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def worst_case_pages(self, request: Request) -> int:
        return pages_for(request.worst_case_tokens, self.tokens_per_page)

    def admit(
        self, waiting: Iterable[Request], kv_cache: KvCache
    ) -> tuple[list[tuple[Request, Admission]], Waiting | None]:
        """Take requests from the front of `waiting` while they fit; the caller removes them.

        A page of the prefix cache that others hold costs a request nothing; those that nobody holds count
        as free until it takes them, which it does here.

        Returns the admitted ones, whose `slot` is set, and why the next one is not among them.
        """
        admitted: list[tuple[Request, Admission]] = []
        for request in waiting:
            if not self._free_slots:
                return admitted, Waiting(request.request_id, WaitCause.SLOTS, self.max_batch_size, 0)
            ids, cache, worst = request.prompt_token_ids, request.cache, self.worst_case_pages(request)
            pages = kv_cache.ask(ids, cache.user, worst, self.committed_pages)
            if not pages.fits:
                return admitted, Waiting(
                    request.request_id, WaitCause.PAGES, pages.needed, max(pages.available, 0)
                )
            request.slot = self._free_slots.pop()
            self.committed_pages += worst
            cache.attached(kv_cache.attach(request.slot, ids, cache.user, pages.match))
            admitted.append(
                (request, Admission(request.request_id, request.slot, pages.needed, pages.available))
            )
        return admitted, None

    def release(self, request: Request) -> None:
        """Take back slot and pages of a request that no submitted step uses any more."""
        self.committed_pages -= self.worst_case_pages(request)
        self._free_slots.append(request.slot)
        request.slot = -1
