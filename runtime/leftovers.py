"""What requests leave to the prefix cache, and when."""

from __future__ import annotations

from functools import partial

from tapeout.runtime.kv_cache import KvCache
from tapeout.runtime.scheduler.capacity import CapacityScheduler
from tapeout.runtime.scheduler.request import FinishReason, Request
from tapeout.runtime.scheduler.running import Running

_FEW = 8  # requests that are looked at one by one: what arrays take for any number costs more


class Leftovers:
    """Contexts are stored once logits behind them were finite, and seen when somebody looks: before an
    admission, and after every step when events tell others of them. What was generated follows when its
    request ends or is paused: nobody asks for it before."""

    def __init__(self, running: Running, kv_cache: KvCache, capacity: CapacityScheduler) -> None:
        self._running, self._kv_cache, self._capacity = running, kv_cache, capacity

    def store_contexts(self) -> None:
        """Those that have been read since this was called last."""
        slots, running = self._kv_cache.unstored_slots(), self._running
        # Finite logits show that what a request has in the cache is sound; before, nothing does.
        if len(slots) <= _FEW:
            for slot in slots.tolist():
                request = running.requests[slot]
                if request is not None and running.has_sampled(slot):
                    self._kv_cache.context_is_known(slot)
                    self._store(request)
            return
        ready = slots[running.alive[slots] & running.have_sampled(slots)]
        for slot in self._kv_cache.slots_to_store(ready, running.known_tokens(ready)):
            self._store(running.request(slot))

    def release(self, request: Request) -> None:
        """Take back slot and pages of a request that no unread step uses."""
        has_failed = request.finish is not None and request.finish.reason is FinishReason.ERROR
        if not has_failed and self._running.has_sampled(request.slot):
            self._store(request)
        self._kv_cache.free(request.slot, failed=has_failed)
        self._capacity.release(request)

    def _store(self, request: Request) -> None:
        slot, running = request.slot, self._running
        known = request.prompt_tokens + running.output_tokens.item(slot) - 1  # as in `Running.known_tokens`
        self._kv_cache.store(slot, known, partial(running.token_ids, request), running.last_step.item(slot))
