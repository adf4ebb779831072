"""What crosses from the scheduler to an executor and back.

Persistent request state stays in the scheduler; a step carries only what this step needs.
Token ids of generation rows live in the executor (one per slot), because step n+1 is
planned before the ids of step n are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob, SampleResult
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache.pages import PageCopies

if TYPE_CHECKING:
    from tapeout.runtime.engine.reader import Engine

__all__ = ["FROM_SLOT", "NO_IDS", "Executor", "Logprob", "StepHandle", "StepInputs", "StepResult"]

NO_IDS = np.zeros(0, np.int32)
FROM_SLOT = -1  # token id placeholder: use the slot's last sampled id


@dataclass(frozen=True)
class StepInputs:
    """One packed step: context sequences first, then generation.

    B sequences, T rows, R sampled rows. All arrays int32.

    Attributes:
        token_ids: [T], FROM_SLOT where the executor fills in the slot's last sampled id.
        positions: [T].
        cu_q: [B + 1] row offsets. kv_lens: [B] cache length after the step.
        page_table: [B, pages] page ids, -1 beyond the pages in use.
        slots: [B] executor slot of each sequence, in [0, max_batch_size).
        row_ids: [R] rows whose logits are sampled. row_slots: [R] their slots.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cu_q: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    slots: np.ndarray
    row_ids: np.ndarray
    row_slots: np.ndarray


#: What a step returns: sampled ids, logprobs and finiteness of its R rows.
StepResult = SampleResult


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step; raises what the executor raised."""


class Executor(PageCopies, Protocol):
    """Replays the engine's program and copies pages. Steps run in the order submitted."""

    limits: Limits

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray = NO_IDS,
    ) -> None:
        """Bind a slot to a request's sampling state; ordered with steps.

        `output_token_ids` are those of a request that was paused and goes on: for penalties and
        `min_tokens` they are output, although the next steps read them as context.
        """

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Queue a step and return at once."""

    def load_weights(self, engine: Engine) -> None:
        """Run with the weights of another engine from the next step on (`engine/replacement.py` says which).

        Waits for queued steps and for the weights; the caller closes the old engine afterwards. KV pages
        and the slots' sampling state stay as they are. After a failure either the old weights still run, or
        every step fails with the reason until weights were loaded again.
        """

    def close(self) -> None:
        """Finish queued work and free memory and threads."""
