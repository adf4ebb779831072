"""What sampling keeps on the device: the slots' last ids and parameters, and results on their way home."""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing

import numpy as np

from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream
from tapeout.runtime.step import StepResult

_PARAMETER_BYTES = 4 * SAMPLE_STATE_WORDS
_TURNS = 4  # results the host may leave unread before a new step has to wait for the oldest


class QueuedStep:
    """A step on the device. `result` waits for it; any thread may ask, as often as it likes."""

    def __init__(self, device: Device, turn: _Turn, rows: int, batch: int) -> None:
        self._device, self._turn, self._rows, self._batch = device, turn, rows, batch
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
        values = self._turn.memory.array.view(np.int32)
        ids = values[: self._rows].copy()
        finite = values[self._batch : self._batch + self._rows] != 0
        return StepResult(ids, (None,) * self._rows, finite)


class _Turn:
    """A pinned buffer for one step's results, and the step that will read it."""

    def __init__(self, size_bytes: int, stack: ExitStack) -> None:
        self.memory = stack.enter_context(closing(PinnedMemory(size_bytes)))
        self.event = stack.enter_context(closing(Event()))
        self.step: QueuedStep | None = None


class SampledIds:
    """Sampling's device buffers (see plugins/cuda.py) for `batch` slots."""

    def __init__(self, batch: int, device: Device) -> None:
        self._batch, self._device = batch, device
        with ExitStack() as stack:

            def zeroed(size_bytes: int, what: str) -> DeviceMemory:
                memory = stack.enter_context(closing(DeviceMemory(size_bytes, what)))
                memory.zero()
                return memory

            self._last_ids = zeroed(4 * batch, "last ids")
            self._output = zeroed(8 * batch, "sampled ids")  # ids [batch], then finite flags [batch]
            self._parameters = zeroed(_PARAMETER_BYTES * batch, "sampling parameters")
            self._host_ids = stack.enter_context(closing(PinnedMemory(4 * batch)))
            self._host_parameters = stack.enter_context(closing(PinnedMemory(_PARAMETER_BYTES * batch)))
            self._turns = [_Turn(8 * batch, stack) for _ in range(_TURNS)]
            self._resources = stack.pop_all()
        self._next = 0

    def addresses(self) -> dict[str, int]:
        """Device addresses by the names launches use."""
        return {
            "last_ids": self._last_ids.address,
            "out_ids": self._output.address,
            "out_finite": self._output.address + 4 * self._batch,
            "sample_state": self._parameters.address,
        }

    def download(self, rows: int, stream: Stream) -> QueuedStep:
        """Queue the copy of the newest ids, `rows` of them, to the next pinned buffer."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.step is not None:
            turn.step.settle()
        stream.download(turn.memory.address, self._output.address, 8 * self._batch)
        turn.event.record(stream)
        turn.step = QueuedStep(self._device, turn, rows, self._batch)
        return turn.step

    def set_parameters(self, slot: int, words: np.ndarray, stream: Stream) -> None:
        """A slot's sampling parameters, in stream order.

        The pinned row is written again only when another request takes the slot: by then the copy is
        over, or the first request never runs.
        """
        start = _PARAMETER_BYTES * slot
        self._host_parameters.array[start : start + _PARAMETER_BYTES] = words.view(np.uint8)
        host = self._host_parameters.address + start
        stream.upload(self._parameters.address + start, host, _PARAMETER_BYTES)

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
