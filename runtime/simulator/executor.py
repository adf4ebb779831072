"""An executor by script: every row that samples gives the same id, at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine import Engine
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import PageCopy
from tapeout.runtime.step import NO_IDS, StepInputs, StepResult


class ScriptedStep:
    """A step that has run."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class ScriptedExecutor:
    """See `tapeout.runtime.step.Executor`. Requests end by their `max_tokens` alone."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self.limits = limits
        self.num_pages, self.host_pages = num_pages, 0
        batch = limits.max_batch_size
        self._ids, self._logprobs = np.zeros(batch, np.int32), (None,) * batch
        self._finite = np.ones(batch, bool)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray = NO_IDS,
    ) -> None:
        pass

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Pages hold nothing."""

    def load_weights(self, engine: Engine) -> None:
        """There are none."""

    def submit(self, inputs: StepInputs) -> ScriptedStep:
        rows = len(inputs.row_ids)
        return ScriptedStep(StepResult(self._ids[:rows], self._logprobs[:rows], self._finite[:rows]))

    def close(self) -> None:
        pass
