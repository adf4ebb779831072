"""The iterator that `LLM.stream` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tapeout.runtime.collector import Collector
from tapeout.runtime.output import RequestOutput


class RequestStream(Iterator[RequestOutput]):
    """Deltas of one request that is already queued.

    A class and not a generator: a generator that was never started runs no `finally`, and the
    request of a stream that is dropped unread must end as well.

    Args:
        advance: drives the loop until the collector has something new, and takes it.
        abandon: ends a request by id; safe to call from a finalizer.
    """

    def __init__(
        self,
        collector: Collector,
        advance: Callable[[Collector], RequestOutput],
        abandon: Callable[[str], None],
    ) -> None:
        self._collector = collector
        self._advance = advance
        self._abandon = abandon
        self._done = False

    @property
    def request_id(self) -> str:
        return self._collector.request_id

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        delta = self._advance(self._collector)
        self._done = delta.finished
        return delta

    def close(self) -> None:
        """End the request if it still runs; nothing more is yielded."""
        if not self._done:
            self._done = True
            self._abandon(self._collector.request_id)

    def __del__(self) -> None:
        self.close()
