"""What sampling keeps on the device: last ids, parameters and counts of slots, results on their way home."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np

from tapeout.plugins.cuda import TURNS
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.logprob_words import LOGPROB_WORDS, read_logprobs
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS, bits_row, counts_row, id_bits, state_words
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.step import StepResult

_PARAMETER_BYTES = 4 * SAMPLE_STATE_WORDS
_LOGPROB_BYTES = 4 * LOGPROB_WORDS


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

    def __init__(
        self, device: Device, turn: _Turn, end: Event, rows: int, top_logprobs: list[int] | None
    ) -> None:
        self._device, self._turn, self._end, self._rows = device, turn, end, rows
        self._top_logprobs = top_logprobs
        self._lock = threading.Lock()
        self._outcome: StepResult | TapeoutError | None = None

    def settle(self) -> StepResult | TapeoutError:
        """Wait, and take the result out of the pinned memory: after this it may be written again."""
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
            self._end.wait()
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
    """Where one step's results arrive, and the step that will read them.

    ids, finite: the turn's place in the outbox, int32 [max_batch_size], written by sampling.
    """

    def __init__(self, outbox: np.ndarray, vocab_size: int, stack: ExitStack) -> None:
        self.ids, self.finite = outbox
        batch = len(self.ids)
        self.memory = stack.enter_context(closing(PinnedMemory(_LOGPROB_BYTES * batch)))
        self.vocab_size = vocab_size
        self.logprobs = self.memory.array.view(np.int32).reshape(batch, LOGPROB_WORDS)
        self.step: QueuedStep | None = None

    def settle(self) -> None:
        if self.step is not None:
            self.step.settle()


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
            self._out_ids = zeroed(4 * batch, "sampled ids")
            self._out_logprobs = zeroed(_LOGPROB_BYTES * batch, "logprobs")
            self._parameters = zeroed(_PARAMETER_BYTES * batch, "sampling parameters")
            self._bits = zeroed(2 * self._bits_bytes * batch, "ids of prompts")
            self._counts = zeroed(self._counts_bytes * batch, "counts of sampled ids")
            self._host_ids = stack.enter_context(closing(PinnedMemory(4 * batch)))
            self._host_parameters = stack.enter_context(closing(PinnedMemory(_PARAMETER_BYTES * batch)))
            self._host_bits = stack.enter_context(closing(PinnedMemory(2 * self._bits_bytes * batch)))
            self._outbox = stack.enter_context(closing(PinnedMemory(TURNS * 8 * batch)))
            boxes = self._outbox.array.view(np.int32).reshape(TURNS, 2, batch)
            self._turns = [_Turn(box, vocab_size, stack) for box in boxes]
            self._resources = stack.pop_all()
        self.outbox_words = 2 * batch

    @staticmethod
    def size_bytes(batch: int, vocab_size: int) -> int:
        """Device memory for that many slots."""
        a_slot = 8 + _LOGPROB_BYTES + _PARAMETER_BYTES + 8 * bits_row(vocab_size) + 4 * counts_row(vocab_size)
        return batch * a_slot

    def addresses(self) -> dict[str, int]:
        """Addresses by the names launches use: on the device, but for the outbox."""
        return {
            "last_ids": self._last_ids.address,
            "out_ids": self._out_ids.address,
            "out_logprobs": self._out_logprobs.address,
            "outbox": self._outbox.address,
            "sample_state": self._parameters.address,
            "sample_bits": self._bits.address,
            "output_counts": self._counts.address,
        }

    def settle(self, turn: int) -> None:
        """Before a step of that turn is launched: whose results are there is read. Waits for that step."""
        self._turns[turn].settle()

    def download(self, turn: int, rows: int, stream: Stream) -> None:
        """Queue the copy of the newest step's logprobs, `rows` of them."""
        stream.download(self._turns[turn].memory.address, self._out_logprobs.address, _LOGPROB_BYTES * rows)

    def queued(self, turn: int, end: Event, rows: int, top_logprobs: np.ndarray | None) -> QueuedStep:
        """The step of that turn, launched: its results are there when `end` has come.

        top_logprobs: [rows] how many each row reports, -1 = none; None when no row does.
        """
        wanted = None if top_logprobs is None else top_logprobs.tolist()
        step = self._turns[turn].step = QueuedStep(self._device, self._turns[turn], end, rows, wanted)
        return step

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
            turn.settle()
        self._resources.close()
