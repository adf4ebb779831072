"""How fast the memory of the machine that runs an engine can be read, by a simple means."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tapeout.plugins.errors import CapacityError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine import Engine
from tapeout.runtime.executors import is_cuda
from tapeout.runtime.host_memory import available_host_bytes

#: Large beside every cache, small beside memory.
_HOST_BYTES, _DEVICE_BYTES = 512 << 20, 2 << 30
_LEAST_BYTES = 1 << 20
_ROUNDS = 7
_READS = 8


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, the best of some rounds, and how they were measured."""

    bytes_per_second: float
    method: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_bandwidth(engine: Engine, threads: int | None = None) -> Bandwidth:
    """Of the memory that holds `engine`'s weights when it runs; best before it is loaded.

    Raises CapacityError where not even a small buffer fits.
    """
    return _device_bandwidth() if is_cuda(engine) else _host_bandwidth(threads or detect_host().threads)


def _host_bandwidth(threads: int) -> Bandwidth:
    size_bytes = min(_HOST_BYTES, available_host_bytes() // 4)
    if size_bytes < _LEAST_BYTES:
        raise CapacityError("no memory for measuring its bandwidth", hint="give --no-roofline")
    values = np.ones(size_bytes // 8, np.int64)
    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(values, threads)
        best = _best_seconds(lambda: list(pool.map(np.sum, parts)))  # numpy sums without the GIL
    return Bandwidth(
        values.nbytes / best,
        f"{threads} threads of numpy sum {values.nbytes >> 20} MiB of int64, best of {_ROUNDS} rounds",
    )


def _device_bandwidth() -> Bandwidth:
    from tapeout.runtime.bench.device_read import DeviceReader
    from tapeout.runtime.executors.cuda.driver import open_device

    device = open_device()
    device.make_current()
    size_bytes = min(_DEVICE_BYTES, device.free_bytes() // 2)
    if size_bytes < _LEAST_BYTES:
        raise CapacityError("no device memory for measuring its bandwidth", hint="give --no-roofline")
    with closing(DeviceReader(size_bytes)) as reader:
        best = _best_seconds(lambda: reader.read(_READS))
        return Bandwidth(
            _READS * reader.size_bytes / best,
            f"a kernel reads {reader.size_bytes >> 20} MiB of device memory, {_READS} times a round, best of "
            f"{_ROUNDS} rounds",
        )


def _best_seconds(work: Callable[[], Any]) -> float:
    work()  # pages are touched, clocks go up
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
