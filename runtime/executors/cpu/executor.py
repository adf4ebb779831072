"""The executor of `cpu` engines: one worker thread that replays steps in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.plugins.native import NATIVE_KERNELS
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.sampler import Sampler
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.executors.copy_check import check_copies
from tapeout.runtime.executors.cpu.page_memory import PageMemory
from tapeout.runtime.executors.cpu.replay import Replay
from tapeout.runtime.executors.cpu.step_state import StepWriter, allocate_step_state
from tapeout.runtime.executors.cpu.weight_store import WeightStore
from tapeout.runtime.executors.memory import BudgetLine, budget_error, check_budget
from tapeout.runtime.executors.step_check import NO_TOKEN, forget_ids
from tapeout.runtime.host_memory import available_host_bytes
from tapeout.runtime.kv_cache.pages import PageCopy
from tapeout.runtime.laps import Laps
from tapeout.runtime.step import FROM_SLOT, NO_IDS, StepInputs, StepResult

R = TypeVar("R")


class CpuExecutor:
    """See `tapeout.runtime.step.Executor`. Make it with `tapeout.runtime.executors.load_executor`.

    Everything that touches tensors happens on the worker, so steps, admissions and `forward`
    take effect in the order they were called.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_pages: int,
        threads: int | None,
        host_pages: int = 0,
        release_weights: bool = False,
        max_buckets: int = 64,
        laps: Laps | None = None,
    ) -> None:
        laps = laps or Laps()
        manifest = engine.manifest
        self.limits = manifest.limits
        self.num_pages, self.host_pages = num_pages, host_pages
        self._engine = engine
        self._vocab_size = manifest.model.vocab_size
        _check_options(num_pages, threads, max_buckets)
        self._allocate(engine, num_pages, host_pages)
        self._writer = StepWriter(self._state, self.limits, self._vocab_size)
        facts = manifest.tokenizer
        self._sampler = Sampler(
            self.limits.max_batch_size,
            self._vocab_size,
            self._vocab_size if facts is None else facts.vocab_size,
            () if facts is None else facts.eos_token_ids,
        )
        self._last_ids = np.full(self.limits.max_batch_size, NO_TOKEN, np.int32)
        self._lost = np.zeros(self.limits.max_batch_size, bool)  # slots whose last step failed
        self._refused: dict[int, Exception] = {}  # slots whose admission failed
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tapeout-cpu")
        try:
            laps.lap("memory")
            self._on_worker(lambda: self._load(threads, max_buckets, release_weights, laps)).result()
        except BaseException:
            self.close()
            raise

    def _load(self, threads: int | None, max_buckets: int, release_weights: bool, laps: Laps) -> None:
        # On the worker: thread counts belong to the thread that computes.
        if threads is not None:
            torch.set_num_threads(threads)
        weights = WeightStore(self._engine, release=release_weights)
        kernels = _load_kernels(self._engine)
        laps.lap("kernels")
        self._replay = Replay(self._engine.program, self._arena, self._state, weights, kernels, max_buckets)
        if not release_weights:
            self._replay.prepare_weights()
        laps.lap("weights")

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray = NO_IDS,
    ) -> None:
        """Bind a slot to a request. A failure surfaces from the slot's next step."""
        if not 0 <= slot < self.limits.max_batch_size:
            raise UsageError(f"slot {slot} does not exist, expected 0 to {self.limits.max_batch_size - 1}")

        def run() -> None:
            self._last_ids[slot], self._lost[slot] = NO_TOKEN, False
            self._refused.pop(slot, None)
            try:
                self._sampler.admit(slot, params, prompt_token_ids, output_token_ids)
            except Exception as error:
                self._refused[slot] = error

        self._on_worker(run)

    def submit(self, inputs: StepInputs) -> Future[StepResult]:
        """Queue a step and return at once; `result()` of what is returned waits for it."""
        return self._on_worker(lambda: self._step(inputs))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """See `tapeout.runtime.kv_cache.pages.PageCopies`; on the worker, between steps."""
        check_copies(copies, self.num_pages, self.host_pages)
        self._on_worker(lambda: self._pages.copy(copies))

    def load_weights(self, engine: Engine) -> None:
        """See `tapeout.runtime.step.Executor`. The old weights run until the new ones are prepared, so that a
        failure changes nothing; for that time both are in memory."""

        def run() -> None:
            self._replay, self._engine = self._replay.with_weights_of(engine), engine

        self._on_worker(run).result()

    def forward(self, inputs: StepInputs) -> np.ndarray:
        """Run a step without sampling; waits. Returns logits float32 [R, vocab], a copy.

        The KV cache is written as in any step. FROM_SLOT ids come from earlier sampled steps.
        """
        return self._on_worker(lambda: self._logits(inputs, self._last_ids).copy()).result()

    def close(self) -> None:
        """Finish queued work, then free memory and the thread. The engine stays open."""
        if self._closed:
            return
        self._closed = True
        self._worker.shutdown(wait=True)
        for name in ("_replay", "_writer", "_pages", "_state", "_arena"):
            self.__dict__.pop(name, None)

    def _step(self, inputs: StepInputs) -> StepResult:
        try:
            for slot in inputs.row_slots.tolist():
                if slot in self._refused:
                    raise self._refused[slot]
            # A step that was planned on ids of one that failed runs for its other rows.
            logits = self._logits(inputs, np.where(self._lost, np.int32(0), self._last_ids))
            sampled = self._sampler.sample(logits, inputs.row_slots, inputs.positions[inputs.row_ids])
        except BaseException:
            self._lost[forget_ids(self._last_ids, inputs.row_slots)] = True
            raise
        lost = self._lost[inputs.row_slots] & (inputs.token_ids[inputs.row_ids] == FROM_SLOT)
        finite, self._lost[inputs.row_slots] = sampled.finite & ~lost, lost
        # The id of a row that is not finite means nothing, but the next step may be queued already.
        self._last_ids[inputs.row_slots] = np.where(finite, sampled.token_ids, 0)
        return StepResult(sampled.token_ids, sampled.logprobs, finite)

    def _logits(self, inputs: StepInputs, last_ids: np.ndarray) -> np.ndarray:
        """Float32 [R, vocab], valid until the next step."""
        t, r = self._writer.write(inputs, last_ids)
        bucket = self._replay.bucket(t, r)
        for call in bucket.calls:
            call()
        logits: np.ndarray = bucket.logits.float().numpy()
        return logits

    def _on_worker(self, work: Callable[[], R]) -> Future[R]:
        if self._closed:
            raise TapeoutError("the executor is closed")

        def run() -> R:
            with torch.inference_mode():
                return work()

        return self._worker.submit(run)

    def _allocate(self, engine: Engine, num_pages: int, host_pages: int) -> None:
        lines = _budget(engine, num_pages, host_pages)
        available = available_host_bytes()
        what = f"engine {engine.path.name}"
        check_budget(what, lines, available)
        try:
            self._arena = torch.zeros(engine.program.arena_bytes, dtype=torch.uint8)
            self._state = allocate_step_state(self.limits, engine.manifest.kv_cache, num_pages)
            self._pages = PageMemory(self._state.kv_pool, host_pages)
        except (RuntimeError, MemoryError):
            raise budget_error(what, lines, available) from None


def _budget(engine: Engine, num_pages: int, host_pages: int) -> list[BudgetLine]:
    manifest = engine.manifest
    tokens = manifest.limits.tokens_per_page
    weights = sum(w.size_bytes for w in engine.weights.values())
    page_bytes = manifest.kv_cache.page_bytes(tokens)
    arena = engine.program.arena_bytes
    pool = f"kv cache ({num_pages} pages of {tokens} tokens)"
    mapped = "weights (mapped from the file)"
    return [
        BudgetLine(mapped, weights, "build with a smaller --dtype or --quantize", counted=False),
        BudgetLine("arena", arena, "build with a lower --max-num-tokens or --max-batch-size"),
        BudgetLine(pool, num_pages * page_bytes, "give the KV cache fewer tokens or bytes"),
        BudgetLine("host tier of the kv cache", host_pages * page_bytes, "lower host_cache_bytes"),
    ]


def _check_options(num_pages: int, threads: int | None, max_buckets: int) -> None:
    problems = [
        f"{name} is {value}, expected at least 1"
        for name, value in (("num_pages", num_pages), ("threads", threads), ("max_buckets", max_buckets))
        if value is not None and value < 1
    ]
    if problems:
        raise UsageError("\n".join(problems))


def _load_kernels(engine: Engine) -> Any:
    if NATIVE_KERNELS not in engine.kernel_names:
        return None
    from tapeout.plugins.native.library import load_native

    return load_native(engine.kernel(NATIVE_KERNELS))
