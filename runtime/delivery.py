"""From ids that were read to the requests' sinks, and the ends that show there."""

from __future__ import annotations

from collections.abc import Callable

from tapeout.runtime.ends import ended_by_id, output_failed
from tapeout.runtime.scheduler.request import Finish, FinishReason, Request
from tapeout.runtime.scheduler.running import Running
from tapeout.runtime.step import Logprob


class Delivery:
    """Hands tokens to sinks: one by one to those that watch, to the others when they end or are asked.

    Args:
        finish: ends a request; called when a token or a stop string does, or its sink fails.
    """

    def __init__(self, running: Running, finish: Callable[[Request, Finish], None]) -> None:
        self._running, self._finish = running, finish

    def look_at(
        self, request: Request, token_id: int, logprobs: dict[int, Logprob] | None, now: float
    ) -> None:
        """A token was read that is its request's first, may be its last, or is watched for."""
        output_tokens = int(self._running.output_tokens[request.slot])
        if output_tokens == 1:
            request.times.first_token = now
        finish = ended_by_id(request, token_id, output_tokens) if token_id in request.ending_ids else None
        if request.watched:
            try:
                stop = request.sink.on_token(token_id, logprobs, finish is not None)
            except Exception as error:
                self._finish(request, output_failed(request, error))
                return
            if finish is None and stop is not None:
                finish = Finish(FinishReason.STOP, stop)
        if finish is None and output_tokens >= request.max_tokens:
            finish = Finish(FinishReason.LENGTH)
        if finish is not None:
            self._finish(request, finish)
        else:
            self._running.looked_at(request)

    def hand_over(self, request: Request) -> bool:
        """Give a sink that does not watch what it has not had; False: it failed, and the request ended."""
        if not request.watched:
            try:
                self.deliver(request, ending=False)
            except Exception as error:
                self._finish(request, output_failed(request, error))
                return False
        return True

    def deliver(self, request: Request, *, ending: bool) -> None:
        """Give the sink all tokens read since the last time; raises what it raises."""
        token_ids = self._running.ids_from(request.slot, request.handed_tokens)
        if token_ids:
            request.handed_tokens += len(token_ids)
            request.sink.on_tokens(token_ids, ending)
