# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A GPU on which what runs before decides how long a kernel takes: `python neighbour_gpu.py`, with the
worker's stdin.

A kernel takes as many microseconds as the digits in its name say, and behind another kernel those behind
its `~`, if it has one. A kernel that is called `~fails` cannot be launched behind another, one that is called
`~breaks` breaks the context there. FREE_IN_STEPS is the memory that is left for whole steps.
"""

from __future__ import annotations

import os
import re
from typing import Any

from cuda.bindings import driver as real
from fake_cuda import Launched
from idle_gpu import IdleCuda

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer import device, worker


class NeighbourCuda(IdleCuda):
    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        self._before, self.broken = "", False
        self.on_launch = self._run

    def _run(self, launched: Launched) -> None:
        alone, _, behind = launched.symbol.partition("~")
        elsewhere = self._before not in {"", "add", launched.symbol}
        self._before = launched.symbol
        if elsewhere and behind in {"fails", "breaks"}:
            self.broken = behind == "breaks"
            raise TapeoutError(f"CUDA: launching a step: {behind}")
        number = re.sub(r"\D", "", behind if elsewhere and behind else alone)
        self.spend(float(number or 200))

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS if self.broken else real.CUresult.CUDA_SUCCESS,)


class LimitedWorker(worker.Worker):
    def run_step(self, index: int) -> None:
        device.cu.free = int(os.environ.get("FREE_IN_STEPS") or device.cu.free)
        super().run_step(index)


def main() -> None:
    driver.cu = device.cu = NeighbourCuda(free=1 << 28)
    worker.Worker = LimitedWorker
    worker.main()


if __name__ == "__main__":
    main()
