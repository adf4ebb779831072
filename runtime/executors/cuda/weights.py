"""Weights from the mapped engine file to the device, through pinned staging buffers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np

from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.executors.cuda.driver import Device, DeviceMemory, Event, PinnedMemory, Stream

_STAGING_BYTES = 32 << 20
_THREADS = 4
_ALIGNMENT = 256


class DeviceWeights:
    """All weights of an engine in one allocation; `address(name)` finds them.

    Several threads copy from the file to pinned memory, each with two buffers and a stream of its
    own, so that reading the page cache and the bus overlap.
    """

    def __init__(self, engine: Engine, device: Device) -> None:
        self._offsets, end = {}, 0
        for name, info in engine.weights.items():
            self._offsets[name] = end
            end += -(-info.size_bytes // _ALIGNMENT) * _ALIGNMENT
        self.memory = DeviceMemory(end, "weights")
        pieces = [
            (name, start, min(start + _STAGING_BYTES, info.size_bytes))
            for name, info in engine.weights.items()
            for start in range(0, info.size_bytes, _STAGING_BYTES)
        ]
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(lambda i: self._copy(engine, device, pieces[i::_THREADS]), range(_THREADS)))
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> int:
        return self.memory.address + self._offsets[name]

    def _copy(self, engine: Engine, device: Device, pieces: list[tuple[str, int, int]]) -> None:
        if not pieces:
            return
        device.make_current()
        staging_bytes = max(stop - start for _, start, stop in pieces)
        with ExitStack() as stack:
            turns = [
                (
                    stack.enter_context(closing(PinnedMemory(staging_bytes))),
                    stack.enter_context(closing(Event())),
                )
                for _ in range(2)
            ]
            stream = stack.enter_context(closing(Stream()))
            for index, (name, start, stop) in enumerate(pieces):
                memory, event = turns[index % 2]
                event.wait()
                source = np.frombuffer(engine.weight(name).data, np.uint8)[start:stop]
                np.copyto(memory.array[: stop - start], source)
                stream.upload(self.address(name) + start, memory.address, stop - start)
                event.record(stream)
            stream.wait()

    def close(self) -> None:
        self.memory.close()
