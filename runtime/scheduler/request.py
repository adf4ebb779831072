"""The persistent state of a request. It never crosses to an executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob


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
        """Take one token. `ending` = it is an EOS or stop id that ends the request.

        Returns the stop string that the text now holds, or None.
        """

    def on_finish(self, finish: Finish, times: RequestTimes) -> None:
        """The request has ended; no more tokens follow."""


@dataclass(slots=True, eq=False)
class Request:
    """A request from arrival to release.

    What is *planned* runs ahead of what is *read* by up to one step: the planner counts tokens
    whose ids the host has not seen yet.

    Attributes:
        max_tokens: tokens to generate at most, already bounded by the engine's limits.
        eos_token_ids, stop_token_ids: ids that end it once `min_tokens` are out.
        slot: executor slot and page table, -1 while waiting and after release.
        cached_tokens: tokens in the KV cache after all submitted steps.
        planned_tokens: output tokens sampled by all submitted steps.
        output_tokens: output tokens read.
        last_step: index of the last submitted step it is part of, -1 before.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    sink: TokenSink
    times: RequestTimes
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    slot: int = -1
    cached_tokens: int = 0
    planned_tokens: int = 0
    output_tokens: int = 0
    last_step: int = -1
    finish: Finish | None = None
    ending_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ending_ids = self.eos_token_ids | self.stop_token_ids

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def worst_case_tokens(self) -> int:
        """Cache tokens it can come to hold: prompt and all output.

        The last sampled id is never an input of a request that ends by length, so this is one more
        than such a request writes; it is the place of the surplus row that runs after a stop the
        host sees one step late.
        """
        return self.prompt_tokens + self.max_tokens
