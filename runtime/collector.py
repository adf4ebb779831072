"""Collects one request's tokens into text and results."""

from __future__ import annotations

from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob
from tapeout.runtime.intake import CheckedRequest
from tapeout.runtime.kv_cache import RequestCache
from tapeout.runtime.output import CompletionOutput, RequestMetrics, RequestOutput
from tapeout.runtime.scheduler.request import Finish, RequestTimes
from tapeout.runtime.text.detokenizer import Detokenizer
from tapeout.runtime.text.stop_strings import StopStrings
from tapeout.runtime.tokenizer import Tokenizer


class Collector:
    """The sink of one request (see `TokenSink`).

    Args:
        epoch_offset: Unix time minus the loop's clock, for the metrics.
        cache: the request's, for what it found in the prefix cache.
    """

    def __init__(
        self,
        request_id: str,
        checked: CheckedRequest,
        tokenizer: Tokenizer | None,
        times: RequestTimes,
        epoch_offset: float,
        cache: RequestCache,
    ) -> None:
        self.request_id = request_id
        self.times = times
        self.finish: Finish | None = None
        self._checked = checked
        self._tokenizer = tokenizer
        self._epoch_offset = epoch_offset
        self._cache = cache
        self._detokenizer = None if tokenizer is None else _detokenizer(tokenizer, checked.params)
        self._stop = StopStrings(checked.params.stop, include=checked.params.include_stop_str_in_output)
        self._prompt_token_ids: tuple[int, ...] | None = None  # made on first use, shared by all deltas
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._taken = (0, 0)  # text pieces and tokens given out as deltas

    @property
    def watches(self) -> bool:
        """Whether every token has to be seen as it comes: its text may end the request, or its row of
        logprobs is kept."""
        return bool(self._checked.params.stop) or self._checked.params.logprobs is not None

    # ---- called by the loop ---------------------------------------------------------------

    def on_token(self, token_id: int, logprobs: dict[int, Logprob] | None, ending: bool) -> str | None:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(self._with_text(logprobs))
        params = self._checked.params
        # The text of an EOS or stop id is no part of the answer.
        if self._detokenizer is None or (ending and not params.include_stop_str_in_output):
            return None
        piece = self._detokenizer.push(token_id)
        self._show(self._stop.push(piece, active=len(self._token_ids) >= params.min_tokens))
        return self._stop.matched

    def on_tokens(self, token_ids: list[int], ending: bool) -> None:
        self._token_ids += token_ids
        if self._detokenizer is None:
            return
        if ending and not self._checked.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        self._show(self._detokenizer.push_all(token_ids))

    def on_finish(self, finish: Finish, times: RequestTimes) -> None:
        if self._detokenizer is not None and self._stop.matched is None:
            # A stop string cannot end in a truncated character, so the tail needs no search.
            self._show(self._stop.flush() + self._detokenizer.flush())
        self.finish = finish

    # ---- called by the user's side --------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.finish is not None

    @property
    def has_delta(self) -> bool:
        return self.finished or len(self._text) > self._taken[0]

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._output("".join(self._text), self._token_ids, self._logprobs)

    def take_delta(self) -> RequestOutput:
        """What came since the last call: new text, new ids, their logprobs."""
        texts, tokens = self._taken
        self._taken = (len(self._text), len(self._token_ids))
        return self._output("".join(self._text[texts:]), self._token_ids[tokens:], self._logprobs[tokens:])

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _with_text(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return logprobs
        text = self._tokenizer.token_text
        return {i: Logprob(p.logprob, p.rank, text(i)) for i, p in logprobs.items()}

    def _output(self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]]) -> RequestOutput:
        asked = self._checked.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs) if asked else None,
            cumulative_logprob=(
                sum(row[i].logprob for row, i in zip(logprobs, token_ids, strict=True)) if asked else None
            ),
            finish_reason=None if self.finish is None else self.finish.reason.value,
            stop_reason=None if self.finish is None else self.finish.stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._checked.prompt,
            prompt_token_ids=self._prompt_ids(),
            outputs=(completion,),
            finished=self.finished,
            metrics=self._metrics(),
            seed=self._checked.params.seed if not self._checked.params.greedy else None,
            num_cached_tokens=None if self._cache.stats is None else self._cache.stats.cached_tokens,
        )

    def _prompt_ids(self) -> tuple[int, ...]:
        if self._prompt_token_ids is None:
            self._prompt_token_ids = tuple(self._checked.prompt_token_ids.tolist())
        return self._prompt_token_ids

    def _metrics(self) -> RequestMetrics:
        t = self.times
        return RequestMetrics(
            arrival_time=t.arrival + self._epoch_offset,
            admitted_time=_shift(t.admitted, self._epoch_offset),
            first_token_time=_shift(t.first_token, self._epoch_offset),
            finish_time=_shift(t.finished, self._epoch_offset),
            queue_seconds=_between(t.arrival, t.admitted),
            prefill_seconds=_between(t.admitted, t.first_token),
            decode_seconds=_between(t.first_token, t.finished),
            prompt_tokens=len(self._checked.prompt_token_ids),
            output_tokens=len(self._token_ids),
        )


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
    skip = params.skip_special_tokens
    return Detokenizer(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), byte_fallback=tokenizer.byte_fallback
    )


def _shift(moment: float | None, offset: float) -> float | None:
    return None if moment is None else moment + offset


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
