"""What sampling a step returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token and its rank (1 = most likely; equal logits rank by id).

    `decoded_token` is the token's own text, filled in where results reach users.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class SampleResult:
    """Sampled ids [R] int32, and per row the logprobs asked for (None where not asked).

    `finite` [R] bool is False where a row's logits held NaN or infinity; its id is meaningless.
    """

    token_ids: np.ndarray
    logprobs: tuple[dict[int, Logprob] | None, ...]
    finite: np.ndarray


def ranked_logprobs(
    token_id: int, logit: float, rank: int, top: Iterable[tuple[int, float]], log_total: float
) -> dict[int, Logprob]:
    """Logprobs by id: the sampled one first, then `top` (id, logit) in rank order."""
    result = {token_id: Logprob(logit - log_total, rank)}
    for i, (top_id, top_logit) in enumerate(top):
        result.setdefault(top_id, Logprob(top_logit - log_total, i + 1))
    return result
