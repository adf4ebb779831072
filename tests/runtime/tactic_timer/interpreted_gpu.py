# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A GPU whose kernels run in Triton's interpreter: `python interpreted_gpu.py JOB.json`.

A program of its own, because TRITON_INTERPRET must be set before kernels are imported; the folders of
fake_cuda.py and interpret_cuda.py belong on PYTHONPATH. It builds a
pack of a few ops and gives it to the timing worker; "cubins" are descriptions of kernels. Prints what
the worker tells, a message a line.

The job: {"ops": [signature fields], "limits": [...], "spoil": {tactic: how}}; how is `wrong` (adds to
one element), `outside` (writes a guard), `cache` (writes a cached token), `unwritten`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fake_cuda import OK, FakeCuda, Launched
from interpret_cuda import teach_bfloat16

from tapeout.compiler.tactics import gpu_pack
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTarget, KernelSpec
from tapeout.plugins.triton_aot.compile import CompiledKernel, KernelResources
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.tactic_timer import device, timing, worker

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
_SPECS: dict[bytes, KernelSpec] = {}


def compile_nothing(specs: list[KernelSpec], sm: int) -> list[CompiledKernel]:
    """A name for each kernel in place of its cubin."""
    done = []
    for spec in specs:
        cubin = b"\x7fELF" + spec.key().encode()
        _SPECS[cubin] = spec
        kinds = (*(kind for _, kind in spec.signature), "*i8", "*i8")
        resources = KernelResources(0, 0)
        done.append(CompiledKernel(cubin, spec.function, 128, 0, 64, 128, resources, kinds))
    return done


class InterpretedCuda(FakeCuda):
    """Runs every launch when it is queued or replayed; an event's time counts the blocks since."""

    def __init__(self) -> None:
        super().__init__(free=1 << 28)
        self._modules: dict[int, KernelSpec] = {}
        self._blocks_run = 0
        self._times: dict[int, int] = {}
        self.on_launch = self._run

    def cuDeviceGetAttribute(self, which: Any, device: int) -> tuple[Any, ...]:
        if which == self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
            return OK, 1 << 16
        return super().cuDeviceGetAttribute(which, device)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return (OK,)

    def cuMemsetD32Async(self, address: int, word: int, count: int, stream: int) -> tuple[Any, ...]:
        array = (ctypes.c_uint32 * count).from_address(address)
        ctypes.memmove(array, (ctypes.c_uint32 * count)(*[word] * count), 4 * count)
        return self._done("cuMemsetD32Async")

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        result = super().cuModuleLoadData(cubin)
        self._modules[result[1]] = _SPECS[cubin]
        return result

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> tuple[Any, ...]:
        return self._done("cuModuleGetFunction", module)

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: int) -> tuple[Any, ...]:
        if self._recording is not None:
            return super().cuLaunchKernelEx(config, function, params, extra)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        self._run(Launched(function, grid, config.blockDimX, 0, *params, overlap=False))
        return self._done("cuLaunchKernelEx")

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self._times[event] = self._blocks_run
        return super().cuEventRecord(event, stream)

    def cuEventElapsedTime(self, first: int, second: int) -> tuple[Any, ...]:
        return self._done("cuEventElapsedTime", (self._times[second] - self._times[first]) / 10.0)

    def _run(self, launched: Launched) -> None:
        spec: KernelSpec = self._modules[launched.symbol]  # type: ignore[index]
        self._blocks_run += launched.grid[0] * launched.grid[1] * launched.grid[2]
        arguments = {}
        for (name, kind), value in zip(spec.signature, launched.values, strict=False):
            if kind.startswith("*"):
                assert value == 0 or self.holds(int(value)), (spec.function, name)
                value = _at(int(value), _TORCH[kind[1:]])
            arguments[name] = value
        kernel = getattr(importlib.import_module(spec.module), spec.function)
        extra = {"OVERLAP": False} if "OVERLAP" in kernel.arg_names else {}
        kernel[launched.grid](**arguments, **spec.constants, **extra)


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One element at an address: the interpreter takes the pointer and asks for no more."""
    memory = (ctypes.c_uint8 * 4).from_address(address or ctypes.addressof(_NOTHING))
    return torch.frombuffer(memory, dtype=dtype, count=1)


_NOTHING = (ctypes.c_uint8 * 16)()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    teach_bfloat16()
    gpu_pack.compile_all = compile_nothing
    fake = InterpretedCuda()
    driver.cu = device.cu = fake
    # Interpreted blocks cost milliseconds.
    timing._MAX_COPIES = timing._FIRST_CALLS = 2
    timing._REPLAYS = timing._MIN_REPLAYS = 1
    timing._GRAPH_US = worker._WARM_UP_US = 0.0
    limits = Limits(*job["limits"])
    target = replace(CudaTarget(90, 4, 232448), tokens_per_page=limits.tokens_per_page)
    signatures = [_signature(fields) for fields in job["ops"]]
    decisions = [
        replace(c, contenders=tuple(x for x in c.contenders if not job["only"] or x.name in job["only"]))
        for c in contests({s.key(): s for s in signatures}, limits, target)
        if c.rows in job["rows"]
    ]
    file = gpu_pack.make_pack(decisions, limits, target, "cuda:sm_90")
    gpu = driver.Device(0)
    timer = worker.Worker(file, gpu, device.l2_bytes(0), _tell)
    for index in range(len(file.pack.entries)):
        entry = file.pack.entries[index]
        names = [c.tactic for c in entry.candidates]
        _tell({"event": "title", "title": entry.title(), "candidates": names})
        timer.run(index, {})
    timer.close()
    _tell({"event": "end", "open": fake.open})


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _signature(fields: dict[str, Any]) -> OpSignature:
    def types(name: str) -> tuple[TensorType, ...]:
        return tuple(TensorType(t["dtype"], tuple(t["shape"])) for t in fields[name])

    return OpSignature(fields["op"], types("inputs"), types("weights"), types("outputs"), fields["attrs"])


if __name__ == "__main__":
    main()
