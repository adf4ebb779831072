# ruff: noqa: N802 (methods have the names of the driver's functions)
"""The timing worker on a driver whose kernels do nothing: `python idle_gpu.py`, with the worker's stdin.

fake_cuda.py belongs on PYTHONPATH. IDLE_GPU_LOADED names a file for the modules it has loaded at the end.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from fake_cuda import OK, FakeCuda, Launched

from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer import device, worker

_L2_BYTES, _LAUNCH_US = 1 << 16, 200.0


class IdleCuda(FakeCuda):
    """What timing needs beside what engines do; launches outside graphs, too, go to `on_launch`."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self.now_us, self._times = 0.0, dict[int, float]()
        self.on_launch = lambda launched: self.spend(_LAUNCH_US)

    def cuDeviceGetAttribute(self, which: Any, device: int) -> tuple[Any, ...]:
        if which == self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
            return OK, _L2_BYTES
        return super().cuDeviceGetAttribute(which, device)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (OK,)

    def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(address, (ctypes.c_uint32 * count)(*[word] * count), 4 * count)
        return self._done("cuMemsetD32Async")

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: int) -> tuple[Any, ...]:
        if self._recording is not None:
            return super().cuLaunchKernelEx(config, function, params, extra)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self.on_launch(Launched(function, grid, config.blockDimX, 0, *params, overlap=False))
        return self._done("cuLaunchKernelEx")

    def spend(self, time_us: float) -> None:
        """What events measure."""
        self.now_us += time_us

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self._times[event] = self.now_us
        return super().cuEventRecord(event, stream)

    def cuEventElapsedTime(self, first: int, second: int) -> tuple[Any, ...]:
        return self._done("cuEventElapsedTime", (self._times[second] - self._times[first]) / 1e3)


class TellingWorker(worker.Worker):
    """Tells what is loaded while somebody still listens."""

    def close(self) -> None:
        super().close()
        if path := os.environ.get("IDLE_GPU_LOADED"):
            Path(path).write_text("\n".join(sys.modules))


def main() -> None:
    driver.cu = device.cu = IdleCuda(free=1 << 28)
    worker.Worker = TellingWorker
    worker.main()


if __name__ == "__main__":
    main()
