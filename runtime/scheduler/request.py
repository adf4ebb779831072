"""The persistent state of a request. It never crosses to an executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob
from tapeout.runtime.kv_cache.users import RequestCache

_NO_IDS = np.zeros(0, np.int32)


class FinishReason(StrEnum):
    """Why a request ended; the values are what users see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Finish:
    """How a request ended.

    `stop_reason` is the stop id or stop string that ended it (None for EOS), or the error's text.
    """

    reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestTimes:
    """Moments on the loop's clock, in seconds; None = not yet."""

    arrival: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


class TokenSink(Protocol):
    """Where a request's tokens go. Called by the loop, in order, under its lock."""

    def on_token(self, token_id: int, logprobs: dict[int, Logprob] | None, ending: bool) -> str | None:
        """Take one token of a request that is watched. `ending` = it is an EOS or stop id that ends it.

        Returns the stop string that the text now holds, or None.
        """

    def on_tokens(self, token_ids: list[int], ending: bool) -> None:
        """Take the next tokens of a request that is not watched; `ending` is about the last of them."""

    def on_finish(self, finish: Finish, times: RequestTimes) -> None:
        """The request has ended; no more tokens follow."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from arrival to release. Its numbers while it runs stand in `Running`, by slot.

    Attributes:
        max_tokens: tokens to generate at most, already bounded by the engine's limits.
        eos_token_ids, stop_token_ids: ids that end it once `min_tokens` are out.
        watched: the sink sees every token as soon as it is read, because its text can end the request or
            its logprobs are wanted. Otherwise it gets them together: at the end, or when it is asked.
        priority: larger is served earlier; see PRIORITY_STEPS.
        cache: its namespace and retention in the prefix cache, and what it found there.
        slot: executor slot and page table, -1 while waiting and after release.
        handed_tokens: tokens a sink that does not watch has been given.
        rank: (step it counts as arrived in, number of its arrival); the smaller one goes first. Set when
            it is queued and kept for good, so that a paused request is still before later ones.
        output_token_ids: ids it had when it was paused last; context, when it runs again.
        lost_tokens: tokens that were in the KV cache when it was paused last.
        worst_case_tokens: cache tokens it can come to hold: prompt and all output. The last sampled id is
            never an input of a request that ends by length, so this is one more than such a request
            writes; it is the place of the surplus row that runs after a stop the host sees one step late.
        pauses: how often it was paused.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    sink: TokenSink
    times: RequestTimes
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    watched: bool = True
    priority: int = 0
    cache: RequestCache = field(default_factory=RequestCache)
    slot: int = -1
    handed_tokens: int = 0
    finish: Finish | None = None
    rank: tuple[int, int] = (0, 0)
    output_token_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    lost_tokens: int = 0
    pauses: int = 0
    context_token_ids: np.ndarray = field(init=False)
    worst_case_tokens: int = field(init=False)
    ending_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.worst_case_tokens = len(self.prompt_token_ids) + self.max_tokens
        self.ending_ids = self.eos_token_ids | self.stop_token_ids
        self.context_token_ids = self.prompt_token_ids

    def paused_with(self, output_token_ids: np.ndarray, cached_tokens: int) -> None:
        """It gave up its slot after these ids, which are copied: they are part of its context when it runs
        again."""
        self.pauses += 1
        self.lost_tokens = cached_tokens
        self.context_token_ids = np.concatenate([self.prompt_token_ids, output_token_ids])
        self.output_token_ids = self.context_token_ids[self.prompt_tokens :]

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens it reads before it samples the next one: the prompt, and what it had when paused."""
        return len(self.context_token_ids)
