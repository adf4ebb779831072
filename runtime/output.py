"""What a request returns, with the names users of vLLM and TensorRT-LLM know."""

from __future__ import annotations

from dataclasses import dataclass

from tapeout.plugins.sample.result import Logprob


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text.

    Attributes:
        index: always 0 (one output per request).
        text: without the stop string or stop token, unless include_stop_str_in_output.
        token_ids: all sampled ids, the EOS or stop id included.
        logprobs: per token, id to Logprob, when asked for.
        cumulative_logprob: sum over the sampled ids, when logprobs were asked for.
        finish_reason: stop, length, abort or error; None while it runs.
        stop_reason: the stop string or stop id; None for EOS; the message for error and abort.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request. `arrival_time` and the other times are Unix seconds; None = not reached.

    Queue = arrival to admission, prefill = admission to first token, decode = first token to end.
    """

    arrival_time: float
    admitted_time: float | None
    first_token_time: float | None
    finish_time: float | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """A request and what it has produced: all of it from `generate`, the new part from `stream`.

    `seed` is the one its draws used, also when none was given; None for greedy requests.
    `num_cached_tokens` are prompt tokens that were not computed because the prefix cache had them; None
    while the request waits.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    seed: int | None = None
    num_cached_tokens: int | None = None
