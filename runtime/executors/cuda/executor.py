"""The executor of `cuda` engines: every step is one graph launch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.sampler import Sampler, ending_ids
from tapeout.plugins.sample.state import device_unsupported, needs_full
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.launches import LaunchTable
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.engine.target import check_gpu, check_sku, not_for
from tapeout.runtime.executors.copy_check import check_copies
from tapeout.runtime.executors.cuda.cublaslt import CublasLt, library_for
from tapeout.runtime.executors.cuda.driver import (
    Device,
    DeviceMemory,
    Event,
    PinnedMemory,
    Stream,
    open_device,
)
from tapeout.runtime.executors.cuda.page_memory import PageMemory
from tapeout.runtime.executors.cuda.replay import Memory, Replay, Sampling, check_table
from tapeout.runtime.executors.cuda.sampled_ids import Admission, SampledIds
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.executors.cuda.weights import DeviceWeights
from tapeout.runtime.executors.memory import BudgetLine, budget_error, check_budget
from tapeout.runtime.executors.step_check import NO_TOKEN, StepChecker, forget_ids
from tapeout.runtime.kv_cache.pages import PageCopy
from tapeout.runtime.laps import Laps
from tapeout.runtime.step import NO_IDS, StepHandle, StepInputs, StepResult
from tapeout.runtime.tensorrt.segments import LoadedSegments, check_package, segment_bytes

logger = logging.getLogger("tapeout")

_NO_LOGPROBS = -1
_ON_DEVICE = 0  # stands for a last id that only the device knows


def open_gpu(engine: Engine, ordinal: int = 0) -> tuple[Device, LaunchTable]:
    """The GPU that runs `engine`, and its launches; nothing is allocated yet.

    Raises EngineIncompatibleError where the engine, the GPU or its driver cannot do it.
    """
    if engine.launches is None:
        raise not_for(engine, f"but holds no launches for a GPU; this machine is cpu:{detect_host().level}")
    try:
        device = open_device(ordinal)
    except EngineIncompatibleError as error:
        raise not_for(engine, f"this machine is cpu:{detect_host().level}: {error}") from error
    check_gpu(engine, device.facts)
    check_table(engine.launches, engine.program, engine.kernel_names, engine.segment_names)
    check_package(engine.launches.segments)
    if versions := engine.launches.matmul_versions():
        library_for(versions)
    return device, engine.launches


def device_memory_left(engine: Engine, ordinal: int = 0, *, strict_sku: bool = False) -> int:
    """Bytes of device memory free beside the engine's weights, arena and workspace.

    Warns in the log of a GPU of another model than the engine's; `strict_sku` makes it an
    EngineIncompatibleError. Raises CapacityError, line by line, when there is no room for these and
    one page of KV cache.
    """
    device, table = open_gpu(engine, ordinal)
    check_sku(engine, device.facts, strict=strict_sku)
    device.make_current()
    segments = segment_bytes(table.segments, engine.segment) if table.segments else 0
    lines, free = _fixed_lines(engine, _workspace_bytes(table, segments)), device.free_bytes()
    check_budget(f"engine {engine.path.name}", [*lines, _pool_line(engine, 1)], free)
    return free - sum(line.size_bytes for line in lines)


def _workspace_bytes(table: LaunchTable, segments_bytes: int) -> int:
    """Kernels and segments work in the same memory: never two of them at once."""
    return max(table.workspace_bytes + table.scratch_bytes, segments_bytes)


def _fixed_lines(engine: Engine, workspace_bytes: int) -> list[BudgetLine]:
    lower = "build with a lower --max-num-tokens or --max-batch-size"
    return [
        BudgetLine("weights", engine.weights_bytes, "build with a smaller --dtype"),
        BudgetLine("arena", engine.program.arena_bytes, lower),
        BudgetLine("workspace", workspace_bytes, lower),
        BudgetLine("sampling", SampledIds.size_bytes(*_slots(engine)), "build with a lower --max-batch-size"),
    ]


def _slots(engine: Engine) -> tuple[int, int]:
    """Slots, and the width of the logits."""
    return engine.manifest.limits.max_batch_size, engine.manifest.model.vocab_size


def _pool_line(engine: Engine, num_pages: int) -> BudgetLine:
    tokens = engine.manifest.limits.tokens_per_page
    size_bytes = num_pages * engine.manifest.kv_cache.page_bytes(tokens)
    name = f"kv cache ({num_pages} page{'s' if num_pages > 1 else ''} of {tokens} tokens)"
    return BudgetLine(name, size_bytes, "give the KV cache fewer tokens or bytes")


class CudaExecutor:
    """See `tapeout.runtime.step.Executor`. Make it with `tapeout.runtime.executors.load_executor`.

    Sampled ids stay on the device and feed the next step; the host reads them from pinned memory
    when it asks for a step's result. A step that holds a request the device cannot sample (see
    `device_unsupported`) downloads its logits as well and samples that request's row on the host, by
    the same definition. Any thread may call; calls take effect in their order.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_pages: int,
        host_pages: int = 0,
        device: int = 0,
        laps: Laps | None = None,
    ) -> None:
        if num_pages < 1 or host_pages < 0:
            raise UsageError(
                f"num_pages is {num_pages} and host_pages {host_pages}, expected at least 1 and 0"
            )
        manifest = engine.manifest
        self.limits = manifest.limits
        self.num_pages, self.host_pages = num_pages, host_pages
        self._vocab_size = manifest.model.vocab_size
        self._logits_view = engine.program.logits
        batch, facts = self.limits.max_batch_size, manifest.tokenizer
        self._checker = StepChecker(self.limits, self._vocab_size, num_pages)
        self._eos_token_ids = () if facts is None else facts.eos_token_ids
        valid_vocab_size = self._vocab_size if facts is None else facts.vocab_size
        self._sampler = Sampler(batch, self._vocab_size, valid_vocab_size, self._eos_token_ids)
        self._last_ids = np.full(batch, NO_TOKEN, np.int32)  # _ON_DEVICE where the slot has one
        self._full = np.zeros(batch, bool)  # slots that need more than plain sampling
        self._on_host = np.zeros(batch, bool)  # slots that the host samples; they are full as well
        self._top_logprobs = np.full(batch, _NO_LOGPROBS)
        self._lock = threading.RLock()
        self._closed = False
        self._weights_problem: str | None = None  # why those on the device are of no use
        self._device, table = open_gpu(engine, device)
        self._device.make_current()
        with ExitStack() as stack:
            self._allocate(engine, table, stack, laps or Laps())
            self._resources = stack.pop_all()

    def _allocate(self, engine: Engine, table: LaunchTable, stack: ExitStack, laps: Laps) -> None:
        limits, kv = self.limits, engine.manifest.kv_cache
        pool = _pool_line(engine, self.num_pages)
        segments = None
        if table.segments:
            segments = stack.enter_context(closing(LoadedSegments(table.segments, engine.segment)))
        workspace_bytes = _workspace_bytes(table, segments.memory_bytes if segments else 0)
        lines = [*_fixed_lines(engine, workspace_bytes), pool]
        what, free = f"engine {engine.path.name}", self._device.free_bytes()
        check_budget(what, lines, free)
        row_elements = self._logits_view.strides[0]
        logits_bytes = limits.max_batch_size * row_elements * DTYPES[self._logits_view.dtype][1]
        try:
            self._stream = stack.enter_context(closing(Stream()))
            laps.lap("memory")
            weights = stack.enter_context(closing(DeviceWeights(engine, self._device)))  # starts copying
            memory = Memory(
                arena=stack.enter_context(closing(DeviceMemory(engine.program.arena_bytes, "the arena"))),
                workspace=stack.enter_context(closing(DeviceMemory(workspace_bytes, "the workspace"))),
                weights=weights,
                step=stack.enter_context(closing(StepBuffers(limits))),
                kv_pool=stack.enter_context(closing(DeviceMemory(pool.size_bytes, "the KV cache"))),
                sampling=stack.enter_context(closing(SampledIds(*_slots(engine), self._device))),
                layers=kv.layers,
            )
            self._logits = stack.enter_context(closing(PinnedMemory(logits_bytes)))
            memory.kv_pool.zero()
            page_bytes = kv.page_bytes(limits.tokens_per_page)
            self._pages = stack.enter_context(
                closing(PageMemory(memory.kv_pool.address, page_bytes, self.host_pages))
            )
            laps.lap("memory")
            cubins = {name: engine.kernel(name) for name in engine.kernel_names}
            products = None
            if versions := table.matmul_versions():
                products = stack.enter_context(closing(CublasLt(library_for(versions))))
            if segments is not None:
                segments.place(memory.workspace.address, workspace_bytes, int(self._stream.handle))
            replay = Replay(engine.program, table, cubins, memory, products, segments)
            self._replay = stack.enter_context(closing(replay))
            laps.lap("kernels")
            weights.wait()
            self._device.wait()  # for memory that was cleared: this executor's stream does not by itself
            laps.lap("weights")
        except CapacityError as error:
            if error.hint is not None:  # it was not the GPU's memory
                raise
            raise budget_error(what, lines, free) from None
        self._steps, self._sampled, self._weights = memory.step, memory.sampling, weights

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray = NO_IDS,
    ) -> None:
        """Bind a slot to a request's sampling state."""
        if not 0 <= slot < self.limits.max_batch_size:
            raise UsageError(f"slot {slot} does not exist, expected 0 to {self.limits.max_batch_size - 1}")
        with self._lock:
            self._enter()
            self._last_ids[slot] = NO_TOKEN
            on_host = device_unsupported(params) is not None
            if on_host:
                self._sampler.admit(slot, params, prompt_token_ids, output_token_ids)
                params = SamplingParams(temperature=0)  # what the device samples is not used
            self._on_host[slot], self._full[slot] = on_host, on_host or needs_full(params)
            self._top_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
            masked = ending_ids(params, self._eos_token_ids, self._vocab_size)
            self._sampled.admit(
                slot, Admission(params, prompt_token_ids, output_token_ids, masked), self._stream
            )

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Queue a step: one graph launch; returns at once.

        Raises at once what is wrong with the step; then its slots have no last ids any more.
        """
        with self._lock:
            self._enter()
            try:
                return self._submit(inputs)
            except BaseException as error:
                forget_ids(self._last_ids, inputs.row_slots)
                self._recount_after(error)
                raise

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """See `tapeout.runtime.kv_cache.pages.PageCopies`."""
        check_copies(copies, self.num_pages, self.host_pages)
        with self._lock:
            self._enter()
            if copies:
                self._pages.copy(copies, self._stream)

    def load_weights(self, engine: Engine) -> None:
        """See `tapeout.runtime.step.Executor`. The new weights take the places of the old ones, so there need
        be no room for both; a copy that fails leaves a mixture, with which no step runs."""
        with self._lock:
            self._enter()
            self._stream.wait()
            self._weights_problem = "they are being replaced"
            try:
                self._weights.begin(engine)
                self._weights.wait()
            except BaseException as error:
                self._weights_problem = f"replacing them failed: {str(error) or type(error).__name__}"
                raise
            self._weights_problem = None

    def forward(self, inputs: StepInputs) -> np.ndarray:
        """Run a step without sampling; waits. Returns logits float32 [R, vocab], a copy.

        The KV cache is written as in any step. FROM_SLOT ids come from earlier sampled steps.
        """
        with self._lock:
            self._enter()
            self._checker.check(inputs, self._last_ids)
            try:
                self._queue(inputs, Sampling.NONE).record(self._stream)
            except BaseException as error:
                self._recount_after(error)
                raise
            return self._download_logits(len(inputs.row_ids))

    def close(self) -> None:
        """Finish queued work, then free all memory. Results of queued steps can still be read."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._device.make_current()
                self._stream.wait()
            except TapeoutError as error:  # nothing is left to wait for; memory is freed all the same
                logger.error("the GPU failed: %s", error)
            self._resources.close()

    def _enter(self) -> None:
        """What every call starts with: the context belongs to threads, and this may be another one."""
        if self._closed:
            raise TapeoutError("the executor is closed")
        self._device.make_current()

    def _submit(self, inputs: StepInputs) -> StepHandle:
        self._checker.check(inputs, self._last_ids)
        slots, top_logprobs, on_host = inputs.row_slots, None, None
        full, turn = bool(self._full[slots].any()), self._steps.turn
        if full:
            top_logprobs, on_host = self._top_logprobs[slots], np.flatnonzero(self._on_host[slots])
            if (top_logprobs == _NO_LOGPROBS).all():
                top_logprobs = None
        end = self._queue(inputs, Sampling.FULL if full else Sampling.PLAIN)
        if top_logprobs is not None:
            self._sampled.download(turn, len(slots), self._stream)
        end.record(self._stream)
        step: StepHandle = self._sampled.queued(turn, end, len(slots), top_logprobs)
        if on_host is not None and len(on_host):
            step = _Done(self._with_rows_of_host(inputs, on_host, step))
        self._last_ids[slots] = _ON_DEVICE
        return step

    def _recount_after(self, error: BaseException) -> None:
        """An interruption may have come when a step was launched and not counted yet."""
        if not isinstance(error, Exception):
            with suppress(TapeoutError):  # the GPU failed: every later step will tell
                self._steps.recount(self._stream)

    def _queue(self, inputs: StepInputs, sampling: Sampling) -> Event:
        """Write a step's tensors and queue its graph; the step has been checked. Returns the event to record
        at its end."""
        if self._weights_problem is not None:
            raise TapeoutError(
                f"the weights on the GPU are of no use: {self._weights_problem}", hint="load weights again"
            )
        bucket = self._replay.bucket(len(inputs.token_ids), len(inputs.slots), len(inputs.row_ids))
        self._sampled.settle(self._steps.turn)
        self._steps.write(inputs)
        self._replay.launch(bucket, self._stream, sampling)
        return self._steps.next_turn()

    def _with_rows_of_host(self, inputs: StepInputs, rows: np.ndarray, step: StepHandle) -> StepResult:
        """The device's result with these rows sampled on the host; waits."""
        logits = self._download_logits(len(inputs.row_ids))[rows]
        slots, positions = inputs.row_slots[rows], inputs.positions[inputs.row_ids[rows]]
        sampled, device = self._sampler.sample(logits, slots, positions), step.result()
        token_ids, finite, logprobs = device.token_ids.copy(), device.finite.copy(), list(device.logprobs)
        token_ids[rows], finite[rows] = sampled.token_ids, sampled.finite
        for row, found in zip(rows.tolist(), sampled.logprobs, strict=True):
            logprobs[row] = found
        # The id of a row that is not finite means nothing, but the next step may be queued already.
        self._sampled.set_last_ids(slots, np.where(sampled.finite, sampled.token_ids, 0), self._stream)
        return StepResult(token_ids, tuple(logprobs), finite)

    def _download_logits(self, rows: int) -> np.ndarray:
        """Float32 [rows, vocab], a copy."""
        row_elements = self._logits_view.strides[0]
        size_bytes = rows * row_elements * DTYPES[self._logits_view.dtype][1]
        if rows:
            self._stream.download(self._logits.address, self._replay.logits_address(), size_bytes)
        self._stream.wait()
        raw = self._logits.array[:size_bytes]
        if self._logits_view.dtype == "bfloat16":  # the upper half of float32
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view(np.float32)
        return values.reshape(rows, row_elements)[:, : self._vocab_size].copy()


@dataclass(frozen=True)
class _Done:
    """A step whose result is at hand."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value
