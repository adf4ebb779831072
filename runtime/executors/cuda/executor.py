"""The executor of `cuda` engines: every step is one metadata copy and one graph launch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.sampler import Sampler
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS, device_unsupported, state_words
from tapeout.runtime.engine.launches import LaunchTable
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.executors.cuda.replay import Memory, Replay
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.executors.cuda.weights import DeviceWeights
from tapeout.runtime.executors.memory import BudgetLine, budget_error
from tapeout.runtime.step import StepHandle, StepInputs, StepResult

_WORD_BYTES = 4 * SAMPLE_STATE_WORDS
_RESULT_TURNS = 4  # results the host may leave unread while it plans ahead


def device_memory_left(engine: Engine, device: int = 0) -> int:
    """Bytes of device memory free beside the engine's weights, arena and workspace."""
    if engine.launches is None:
        raise EngineIncompatibleError(f"{engine.path} holds no launches for a GPU")
    gpu = Device(device)
    try:
        free = gpu.free_bytes()
    finally:
        gpu.close()
    weights = sum(info.size_bytes for info in engine.weights.values())
    fixed = (
        weights + engine.program.arena_bytes + engine.launches.workspace_bytes + engine.launches.scratch_bytes
    )
    return max(free - fixed, 0)


class CudaExecutor:
    """See `tapeout.runtime.step.Executor`. Make it with `tapeout.runtime.executors.load_executor`.

    Sampled ids stay on the device and feed the next step; the host reads them from pinned memory
    when it asks for a step's result. A step that holds a request with penalties, min_tokens or
    logprobs (see `device_unsupported`) downloads its logits and samples all its rows on the host, by
    the same definition.
    """

    def __init__(self, engine: Engine, *, num_pages: int, device: int = 0) -> None:
        manifest = engine.manifest
        table = engine.launches
        if table is None:
            raise EngineIncompatibleError(f"{engine.path} holds no launches for a GPU")
        self.limits = manifest.limits
        self.num_pages = num_pages
        self._vocab_size = manifest.model.vocab_size
        self._logit_bytes = {"float32": 4, "bfloat16": 2}[engine.program.logits.dtype]
        self._closers: list[object] = []
        self._device = Device(device)
        try:
            self._allocate(engine, table, num_pages)
        except BaseException:
            self.close()
            raise
        facts = manifest.tokenizer
        self._sampler = Sampler(
            self.limits.max_batch_size,
            self._vocab_size,
            self._vocab_size if facts is None else facts.vocab_size,
            () if facts is None else facts.eos_token_ids,
        )
        self._on_host = np.zeros(self.limits.max_batch_size, bool)

    def _allocate(self, engine: Engine, table: LaunchTable, num_pages: int) -> None:
        limits, kv = self.limits, engine.manifest.kv_cache
        kv_bytes = num_pages * kv.page_bytes(limits.tokens_per_page)
        lines = [
            BudgetLine(
                "weights", sum(w.size_bytes for w in engine.weights.values()), "build with a smaller --dtype"
            ),
            BudgetLine("arena", engine.program.arena_bytes, "build with a lower --max-num-tokens"),
            BudgetLine(
                "workspace",
                table.workspace_bytes + table.scratch_bytes,
                "build with a lower --max-num-tokens",
            ),
            BudgetLine(f"kv cache ({num_pages} pages)", kv_bytes, "give the KV cache fewer tokens or bytes"),
        ]
        free = self._device.free_bytes()
        if sum(line.size_bytes for line in lines) > free:
            raise budget_error(f"engine {engine.path.name}", lines, free)
        try:
            self._stream = self._keep(Stream())
            weights = self._keep(DeviceWeights(engine, self._device))
            arena = self._keep(DeviceMemory(engine.program.arena_bytes, "the arena"))
            workspace = self._keep(DeviceMemory(table.workspace_bytes + table.scratch_bytes, "workspace"))
            pool = self._keep(DeviceMemory(kv_bytes, "the KV cache"))
            self._steps = self._keep(StepBuffers(limits))
            self._state = self._keep(_State(limits.max_batch_size))
        except CapacityError:
            raise budget_error(f"engine {engine.path.name}", lines, free) from None
        pool.zero()
        self._logits = PinnedMemory(limits.max_batch_size * self._vocab_size * self._logit_bytes)
        self._keep(self._logits)
        memory = Memory(arena, workspace, weights, self._steps, pool, self._state.addresses(), kv.layers)
        cubins = {name: engine.kernel(name) for name in engine.kernel_names}
        self._replay = self._keep(Replay(engine.program, table, cubins, memory))

    def _keep(self, resource):  # type: ignore[no-untyped-def]
        self._closers.append(resource)
        return resource

    def admit(self, slot: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> None:
        """Bind a slot to a new request's sampling state."""
        if not 0 <= slot < self.limits.max_batch_size:
            raise UsageError(f"slot {slot} does not exist, expected 0 to {self.limits.max_batch_size - 1}")
        self._sampler.admit(slot, params, prompt_token_ids)
        self._on_host[slot] = device_unsupported(params) is not None
        if not self._on_host[slot]:
            self._device.make_current()
            self._state.set_parameters(slot, state_words(params), self._stream)

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Queue a step: one copy, one graph launch, one copy back; returns at once."""
        self._queue(inputs)
        if self._on_host[inputs.row_slots].any():
            return _Done(self._sample_on_host(inputs))
        return _Step(self._state, self._state.download(self._stream), len(inputs.row_ids))

    def forward(self, inputs: StepInputs) -> np.ndarray:
        """Run a step and wait; logits float32 [R, vocab]. The sampled ids are ignored."""
        self._queue(inputs)
        return self._download_logits(len(inputs.row_ids))

    def _queue(self, inputs: StepInputs) -> None:
        if not 0 < len(inputs.token_ids) <= self.limits.max_num_tokens:
            raise TapeoutError(
                f"{len(inputs.token_ids)} token rows, expected 1 to {self.limits.max_num_tokens}"
            )
        self._device.make_current()
        self._steps.upload(inputs, self._stream)
        bucket = self._replay.bucket(len(inputs.token_ids), max(1, len(inputs.row_ids)))
        self._replay.launch(bucket, self._stream)

    def _sample_on_host(self, inputs: StepInputs) -> StepResult:
        logits = self._download_logits(len(inputs.row_ids))
        sampled = self._sampler.sample(logits, inputs.row_slots, inputs.positions[inputs.row_ids])
        self._state.set_last_ids(
            inputs.row_slots, np.where(sampled.finite, sampled.token_ids, 0), self._stream
        )
        return StepResult(sampled.token_ids, sampled.logprobs, sampled.finite)

    def _download_logits(self, rows: int) -> np.ndarray:
        count = rows * self._vocab_size
        self._stream.download(self._logits.address, self._replay.logits_address(), count * self._logit_bytes)
        self._stream.wait()
        raw = self._logits.array[: count * self._logit_bytes]
        if self._logit_bytes == 4:
            return raw.view(np.float32).reshape(rows, -1).copy()
        # bfloat16 is the upper half of float32
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, -1)

    def close(self) -> None:
        """Wait for queued work, then free everything."""
        if hasattr(self, "_stream"):
            self._stream.wait()
        for resource in reversed(self._closers):
            resource.close()  # type: ignore[attr-defined]
        self._closers.clear()


@dataclass(frozen=True)
class _Done:
    """A step whose result is at hand."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class _State:
    """Sampled ids on the device, and pinned memory for their way to the host."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.last_ids = DeviceMemory(4 * batch, "last ids")
        self.output = DeviceMemory(8 * batch, "sampled ids")  # ids [batch], then finite flags [batch]
        self.last_ids.zero()
        self.output.zero()
        self.parameters = DeviceMemory(_WORD_BYTES * batch, "sampling parameters")
        self.parameters.zero()
        self._host_ids = PinnedMemory(4 * batch)
        self._host_parameters = PinnedMemory(_WORD_BYTES * batch)
        self._turns = deque((PinnedMemory(8 * batch), Event()) for _ in range(_RESULT_TURNS))

    def addresses(self) -> dict[str, int]:
        return {
            "last_ids": self.last_ids.address,
            "out_ids": self.output.address,
            "out_finite": self.output.address + 4 * self._batch,
            "sample_state": self.parameters.address,
        }

    def download(self, stream: Stream) -> tuple[PinnedMemory, Event]:
        """Queue the copy of the newest ids to the next pinned buffer."""
        memory, event = self._turns[0]
        self._turns.rotate(-1)
        stream.download(memory.address, self.output.address, 8 * self._batch)
        event.record(stream)
        return memory, event

    def read(self, memory: PinnedMemory, rows: int) -> StepResult:
        values = memory.array.view(np.int32)
        ids = values[:rows].copy()
        finite = values[self._batch : self._batch + rows] != 0
        return StepResult(ids, (None,) * rows, finite)

    def set_parameters(self, slot: int, words: np.ndarray, stream: Stream) -> None:
        """A slot's sampling parameters, in stream order. The row of a slot is rewritten only when a
        new request takes it, long after the copy of the old one."""
        start = _WORD_BYTES * slot
        self._host_parameters.array[start : start + _WORD_BYTES] = words.view(np.uint8)
        stream.upload(self.parameters.address + start, self._host_parameters.address + start, _WORD_BYTES)

    def set_last_ids(self, slots: np.ndarray, ids: np.ndarray, stream: Stream) -> None:
        """Ids the host sampled, for the next step's generation rows; waits."""
        host = self._host_ids.array.view(np.int32)
        stream.download(self._host_ids.address, self.last_ids.address, 4 * self._batch)
        stream.wait()
        host[slots] = ids
        stream.upload(self.last_ids.address, self._host_ids.address, 4 * self._batch)
        stream.wait()

    def close(self) -> None:
        self.last_ids.close()
        self.output.close()
        self.parameters.close()
        self._host_ids.close()
        self._host_parameters.close()
        for memory, event in self._turns:
            memory.close()
            event.close()


@dataclass
class _Step:
    """A queued step; its result is copied out of the pinned buffer once."""

    state: _State
    turn: tuple[PinnedMemory, Event]
    rows: int

    def result(self) -> StepResult:
        memory, event = self.turn
        event.wait()
        return self.state.read(memory, self.rows)
