"""What sampling keeps on the device: last ids, parameters and counts of slots, results on their way home."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.logprob_words import LOGPROB_WORDS, read_logprobs
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS, bits_row, counts_row, id_bits, state_words
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.step import StepResult

_PARAMETER_BYTES = 4 * SAMPLE_STATE_WORDS
_RESULT_BYTES = 8 + 4 * LOGPROB_WORDS
_TURNS = 4  # results the host may leave unread before a new step has to wait for the oldest


@dataclass(frozen=True)
class Admission:
    """What the device has to know of a request: parameters, prompt ids, ids sampled before it was paused,
    ids that `min_tokens` masks."""

    params: SamplingParams
    prompt: np.ndarray
    output: np.ndarray
    masked: np.ndarray


class QueuedStep:
    """A step on the device. `result` waits for it; any thread may ask, as often as it likes."""

    def __init__(self, device: Device, turn: _Turn, rows: int, top_logprobs: list[int] | None) -> None:
        self._device, self._turn, self._rows = device, turn, rows
        self._top_logprobs = top_logprobs
        self._lock = threading.Lock()
        self._outcome: StepResult | TapeoutError | None = None

    def settle(self) -> StepResult | TapeoutError:
        """Wait, and take the result out of the pinned buffer: after this the buffer may be reused."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._read()
            return self._outcome

    def result(self) -> StepResult:
        outcome = self.settle()
        if isinstance(outcome, TapeoutError):
            raise outcome
        return outcome

    def _read(self) -> StepResult | TapeoutError:
        try:
            self._device.make_current()
            self._turn.event.wait()
        except TapeoutError as error:  # the device failed; so will everything after it
            return error
        ids = self._turn.ids[: self._rows].copy()
        finite = self._turn.finite[: self._rows] != 0
        logprobs: tuple[dict[int, Logprob] | None, ...] = (None,) * self._rows
        if self._top_logprobs is not None:
            words, vocab_size = self._turn.logprobs, self._turn.vocab_size
            logprobs = tuple(
                read_logprobs(words[r], int(ids[r]), top_n, vocab_size) if top_n >= 0 and finite[r] else None
                for r, top_n in enumerate(self._top_logprobs)
            )
        return StepResult(ids, logprobs, finite)


class _Turn:
    """A pinned buffer for one step's results, and the step that will read it."""

    def __init__(self, batch: int, vocab_size: int, stack: ExitStack) -> None:
        self.memory = stack.enter_context(closing(PinnedMemory(_RESULT_BYTES * batch)))
        self.event = stack.enter_context(closing(Event()))
        self.vocab_size = vocab_size
        values = self.memory.array.view(np.int32)
        self.ids, self.finite = values[:batch], values[batch : 2 * batch]
        self.logprobs = values[2 * batch :].reshape(batch, LOGPROB_WORDS)
        self.step: QueuedStep | None = None


class SampledIds:
    """Sampling's device buffers (see plugins/cuda.py) for `batch` slots.

    What a slot's request needs beyond its parameters is written only for those that need it: the ids
    of its prompt and zeroed counts for penalties, the masked ids for min_tokens.
    """

    def __init__(self, batch: int, vocab_size: int, device: Device) -> None:
        self._batch, self._vocab_size, self._device = batch, vocab_size, device
        self._bits_bytes, self._counts_bytes = 4 * bits_row(vocab_size), 4 * counts_row(vocab_size)
        with ExitStack() as stack:

            def zeroed(size_bytes: int, what: str) -> DeviceMemory:
                memory = stack.enter_context(closing(DeviceMemory(size_bytes, what)))
                memory.zero()
                return memory

            self._last_ids = zeroed(4 * batch, "last ids")
            # Ids [batch], finite flags [batch], logprobs [batch, LOGPROB_WORDS].
            self._output = zeroed(_RESULT_BYTES * batch, "sampled ids")
            self._parameters = zeroed(_PARAMETER_BYTES * batch, "sampling parameters")
            self._bits = zeroed(2 * self._bits_bytes * batch, "ids of prompts")
            self._counts = zeroed(self._counts_bytes * batch, "counts of sampled ids")
            self._host_ids = stack.enter_context(closing(PinnedMemory(4 * batch)))
            self._host_parameters = stack.enter_context(closing(PinnedMemory(_PARAMETER_BYTES * batch)))
            self._host_bits = stack.enter_context(closing(PinnedMemory(2 * self._bits_bytes * batch)))
            self._turns = [_Turn(batch, vocab_size, stack) for _ in range(_TURNS)]
            self._resources = stack.pop_all()
        self._next = 0

    @staticmethod
    def size_bytes(batch: int, vocab_size: int) -> int:
        """Device memory for that many slots."""
        a_slot = 4 + _RESULT_BYTES + _PARAMETER_BYTES + 8 * bits_row(vocab_size) + 4 * counts_row(vocab_size)
        return batch * a_slot

    def addresses(self) -> dict[str, int]:
        """Device addresses by the names launches use."""
        return {
            "last_ids": self._last_ids.address,
            "out_ids": self._output.address,
            "out_finite": self._output.address + 4 * self._batch,
            "out_logprobs": self._output.address + 8 * self._batch,
            "sample_state": self._parameters.address,
            "sample_bits": self._bits.address,
            "output_counts": self._counts.address,
        }

    def download(self, rows: int, top_logprobs: np.ndarray | None, stream: Stream) -> QueuedStep:
        """Queue the copy of the newest results, `rows` of them, to the next pinned buffer.

        top_logprobs: [rows] how many each row reports, -1 = none; None when no row does.
        """
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.step is not None:
            turn.step.settle()
        reported = rows if top_logprobs is not None and (top_logprobs >= 0).any() else 0
        size_bytes = 8 * self._batch + 4 * LOGPROB_WORDS * reported
        stream.download(turn.memory.address, self._output.address, size_bytes)
        turn.event.record(stream)
        turn.step = QueuedStep(
            self._device, turn, rows, top_logprobs.tolist() if top_logprobs is not None and reported else None
        )
        return turn.step

    def admit(self, slot: int, request: Admission, stream: Stream) -> None:
        """Give a slot to a request, in stream order; nothing waits, but for one with penalties that was
        paused, whose counts are too much to keep pinned for every slot.

        Pinned rows are written again only when another request takes the slot: by then the copy is
        over, or the first request never runs.
        """
        if request.params.has_penalties:
            self._upload_bits(2 * slot, request.prompt, stream)
            counts = self._counts.address + slot * self._counts_bytes
            if len(request.output):
                row = np.bincount(request.output, minlength=counts_row(self._vocab_size)).astype(np.int32)
                stream.upload(counts, row.ctypes.data, self._counts_bytes)
                stream.wait()  # `row` is not pinned
            else:
                stream.zero(counts, self._counts_bytes)
        if request.params.min_tokens:
            self._upload_bits(2 * slot + 1, request.masked, stream)
        words = state_words(request.params, len(request.output)).view(np.uint8)
        self._upload(self._parameters, self._host_parameters, _PARAMETER_BYTES * slot, words, stream)

    def _upload_bits(self, row: int, ids: np.ndarray, stream: Stream) -> None:
        bits = id_bits(ids, self._vocab_size).view(np.uint8)
        self._upload(self._bits, self._host_bits, row * self._bits_bytes, bits, stream)

    @staticmethod
    def _upload(
        to: DeviceMemory, staging: PinnedMemory, start: int, data: np.ndarray, stream: Stream
    ) -> None:
        staging.array[start : start + len(data)] = data
        stream.upload(to.address + start, staging.address + start, len(data))

    def set_last_ids(self, slots: np.ndarray, ids: np.ndarray, stream: Stream) -> None:
        """Ids the host sampled, for the next step's generation rows; waits."""
        host = self._host_ids.array.view(np.int32)
        stream.download(self._host_ids.address, self._last_ids.address, 4 * self._batch)
        stream.wait()
        host[slots] = ids
        stream.upload(self._last_ids.address, self._host_ids.address, 4 * self._batch)
        stream.wait()

    def close(self) -> None:
        """Settle every step that is still out, then free all."""
        for turn in self._turns:
            if turn.step is not None:
                turn.step.settle()
        self._resources.close()
