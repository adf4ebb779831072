"""A checked prompt as a request for the loop, and the collector that takes its tokens."""

from __future__ import annotations

import time

from tapeout.runtime.collector import Collector
from tapeout.runtime.intake import CheckedRequest
from tapeout.runtime.kv_cache import RequestCache
from tapeout.runtime.scheduler.request import Request, RequestTimes
from tapeout.runtime.tokenizer import Tokenizer


def new_request(
    request_id: str,
    checked: CheckedRequest,
    *,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    priority: int,
    arrival: float,
) -> tuple[Request, Collector]:
    """Arrived now, at `arrival` on the loop's clock, in seconds. The request's sink is the collector."""
    times, cache = RequestTimes(arrival), RequestCache(checked.cache_user)
    collector = Collector(request_id, checked, tokenizer, times, time.time() - arrival, cache)
    request = Request(
        request_id=request_id,
        prompt_token_ids=checked.prompt_token_ids,
        params=checked.params,
        max_tokens=checked.max_tokens,
        sink=collector,
        times=times,
        eos_token_ids=frozenset() if checked.params.ignore_eos else eos_token_ids,
        stop_token_ids=frozenset(checked.params.stop_token_ids),
        watched=collector.watches,
        priority=priority,
        cache=cache,
    )
    return request, collector
