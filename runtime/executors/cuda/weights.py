"""Weights from the engine file to the device, through pinned staging buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

from tapeout.runtime.engine.container import CHUNK_BYTES
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream

_STAGING_BYTES = 2 * CHUNK_BYTES
_MAX_THREADS = 8


class DeviceWeights:
    """All weights of an engine in one allocation, laid out as in the file; `address(name)` finds them.

    Making it starts the copy; `wait` ends it. `begin` copies those of another engine with the same layout
    to the same places, so that captured graphs read them from then on.

    Threads take pieces of the region in turn, read each into pinned memory, compare its checksums there and
    queue its copy, so that reading the page cache, hashing and the bus overlap with each other and with what
    else is loaded meanwhile.
    """

    def __init__(self, engine: Engine, device: Device) -> None:
        self._device = device
        self._offsets = {name: i.begin - engine.weights_begin for name, i in engine.weights.items()}
        self._stop, self._pieces_lock = threading.Event(), threading.Lock()
        self.memory = DeviceMemory(engine.weights_bytes, "weights")
        self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """Start copying; an earlier copy has been waited for."""
        self._engine = engine
        self._stop.clear()
        self._pieces = self._all_pieces()
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tapeout-weights")
        self._copies: list[Future[None]] = [self._pool.submit(self._copy) for _ in range(threads)]

    def wait(self) -> None:
        """Return when every weight is on the device.

        Raises EngineCorruptError for a chunk that does not match its checksum, TapeoutError for the driver's
        errors.
        """
        try:
            for copy in self._copies:
                copy.result()
        finally:
            self._end_copies()

    def address(self, name: str) -> int:
        return self.memory.address + self._offsets[name]

    def close(self) -> None:
        self._end_copies()
        self.memory.close()

    def _end_copies(self) -> None:
        """Let copies that still run end early, and wait for them: they write to this memory."""
        self._stop.set()
        self._pool.shutdown()

    def _all_pieces(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of the region's pieces."""
        total = self._engine.weights_bytes
        for offset in range(0, total, _STAGING_BYTES):
            yield offset, min(_STAGING_BYTES, total - offset)

    def _next_piece(self) -> tuple[int, int] | None:
        with self._pieces_lock:
            return None if self._stop.is_set() else next(self._pieces, None)

    def _copy(self) -> None:
        """Copy pieces until none is left, with two buffers and a stream of this thread's own."""
        try:
            self._device.make_current()
            with ExitStack() as stack:
                turns = [
                    (
                        stack.enter_context(closing(PinnedMemory(_STAGING_BYTES))),
                        stack.enter_context(closing(Event())),
                    )
                    for _ in range(2)
                ]
                stream = stack.enter_context(closing(Stream()))
                stack.callback(stream.wait)  # before anything above is freed, whatever happens
                while (piece := self._next_piece()) is not None:
                    (memory, event), (offset, size) = turns[0], piece
                    turns.reverse()
                    event.wait()
                    self._engine.read_weights(offset, memory.array.data[:size])
                    stream.upload(self.memory.address + offset, memory.address, size)
                    event.record(stream)
        except BaseException:
            self._stop.set()
            raise
