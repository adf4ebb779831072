"""The timing worker on an L4 whose kernels do nothing, with a stand-in for TensorRT-RTX: `python
segment_gpu.py`, with the worker's stdin. fake_cuda.py and fake_tensorrt.py belong on PYTHONPATH.

A launch takes 200 microseconds. SEGMENT_GPU says what segments do, in JSON: {"version": of the package, or
null where there is none, "us": {rows: microseconds of a segment}, "wrong": [rows], "crash": [rows], of a
region of ids, "fault": [rows], of one that ends in logits, "gpu": another GPU's name}. Rows are those of a
segment's first input.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from cuda.bindings import driver as real
from fake_cuda import Launched
from fake_tensorrt import SYMBOL, Call, FakeTensorRt
from idle_gpu import IdleCuda

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer import device, timing, whole_step, worker
from tapeout.runtime.tactic_timer.checking import Checker
from tapeout.runtime.tactic_timer.region import RegionChecker
from tapeout.runtime.tensorrt import segments
from tapeout.runtime.tensorrt.package import KINDS, RTX, Package

SCRIPT = json.loads(os.environ["SEGMENT_GPU"])
_LAUNCH_US = 200.0


class ScriptedTensorRt(FakeTensorRt):
    """Does what the script says when a segment is queued."""

    def queued(self, call: Call) -> None:
        rows, outputs = call.shapes["x0"][0], call.engine.graph.output
        if rows in SCRIPT["crash"] and len(call.shapes["x0"]) == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        symbols = {d.dim_param for o in outputs for d in o.type.tensor_type.shape.dim}
        if rows in SCRIPT["fault"] and "R" in symbols:
            self.cuda.broken = True
            raise TapeoutError("CUDA: launching a graph: CUDA_ERROR_ILLEGAL_ADDRESS")


class SegmentCuda(IdleCuda):
    def __init__(self) -> None:
        super().__init__(sm=89, name=SCRIPT.get("gpu", "NVIDIA L4"), free=1 << 28)
        self.broken = False
        self.tensorrt = ScriptedTensorRt(self)
        self.on_launch = self._run

    def _run(self, launched: Launched) -> None:
        if launched.symbol != SYMBOL:
            self.spend(_LAUNCH_US)
            return
        rows = self.tensorrt.calls[int(launched.values[0])].shapes["x0"][0]
        self.spend(SCRIPT["us"][str(rows)])

    def cuCtxSynchronize(self) -> tuple[Any, ...]:  # noqa: N802
        return (real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS if self.broken else real.CUresult.CUDA_SUCCESS,)


class BelievingChecker(Checker):
    """Kernels that do nothing have no right results."""

    def reference_problem(self) -> str | None:
        super().reference_problem()
        return None

    def problem(self, candidate: Any) -> str | None:
        super().problem(candidate)
        return None


class ScriptedRegionChecker(RegionChecker):
    def problem(self) -> str | None:
        wrong = self._region._case.rows in SCRIPT["wrong"]
        return super().problem() or ("output x9: 3 of 8 elements differ" if wrong else None)


def main() -> None:
    fake = SegmentCuda()
    driver.cu = device.cu = fake
    version = SCRIPT["version"]
    segments.installed_version = {RTX: version}.get
    segments.load = lambda name: Package(KINDS[name], version, fake.tensorrt.module)
    worker.Checker, worker.RegionChecker = BelievingChecker, ScriptedRegionChecker
    # Nothing is to be measured here.
    timing._MAX_COPIES = timing._FIRST_CALLS = 1
    timing._REPLAYS = timing._MIN_REPLAYS = timing._ROUNDS = timing._MIN_ROUNDS = 1
    timing._GRAPH_US = worker._WARM_UP_US = 0.0
    whole_step._MAX_TURNS = 1
    worker.main()


if __name__ == "__main__":
    main()
