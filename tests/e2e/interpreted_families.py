# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A family's engine for a GPU, run from end to end without one: `python interpreted_families.py FAMILY...`

A program of its own, because TRITON_INTERPRET must be set before kernels are imported; the folders of
fake_cuda.py, fake_kernels.py, interpret_cuda.py and gpu_families.py belong on PYTHONPATH. The driver is made
of host memory, a "cubin" is the description of a kernel, and Triton's interpreter runs what is launched, at
the addresses and with the grids of the engine's launch table. Prints {"family", "problems"} a line: how the
logits of a few steps differ from those of the CPU's engine.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import torch
from fake_cuda import FakeCuda, Launched
from fake_kernels import compile_nothing
from gpu_cases import PAGES, VOCAB_SIZE, packed_step
from gpu_families import LIMITS, family_file
from interpret_cuda import TORCH_TYPES, teach_bfloat16
from make_families import build_tiny, write_checkpoint

from tapeout.compiler import cuda_plan
from tapeout.compiler.front_end import FrontEnd
from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.triton_aot import CompiledKernel
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor
from tapeout.runtime.executors.cuda import driver, replay

SMALL = {**LIMITS, "max_batch_size": 3, "max_seq_len": 64}
_SPECS: dict[bytes, KernelSpec] = {}
_NOTHING = (ctypes.c_uint8 * 16)()


def described(specs: Sequence[KernelSpec], sm: int) -> list[CompiledKernel]:
    done = compile_nothing(specs, sm)
    _SPECS.update((kernel.cubin, spec) for kernel, spec in zip(done, specs, strict=True))
    return done


class InterpretedCuda(FakeCuda):
    """Runs the launches of a graph as it is replayed."""

    def __init__(self) -> None:
        super().__init__(free=1 << 28)
        self._modules: dict[int, KernelSpec] = {}
        self.on_launch = self._run

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        result = super().cuModuleLoadData(cubin)
        self._modules[result[1]] = _SPECS[cubin]
        return result

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> tuple[Any, ...]:
        return self._done("cuModuleGetFunction", module)

    def _run(self, launched: Launched) -> None:
        spec: KernelSpec = self._modules[launched.symbol]  # type: ignore[index]
        arguments = {}
        for (name, kind), value in zip(spec.signature, launched.values, strict=False):
            if kind.startswith("*"):
                assert value == 0 or self.holds(int(value)), (spec.function, name)
                value = _at(int(value), TORCH_TYPES[kind[1:]])
            arguments[name] = value
        kernel = getattr(importlib.import_module(spec.module), spec.function)
        extra = {"OVERLAP": False} if "OVERLAP" in kernel.arg_names else {}
        kernel[launched.grid](**arguments, **spec.constants, **extra)


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A few bytes at an address: the interpreter takes the pointer and asks for no more."""
    memory = (ctypes.c_uint8 * 8).from_address(address or ctypes.addressof(_NOTHING))
    return torch.frombuffer(memory, dtype=dtype)


def logits_of(engine: Path) -> list[np.ndarray]:
    """Of a prompt that crosses a page beside a short one, of decoding both, and of a third beside them."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(5, VOCAB_SIZE, n).tolist() for n in (18, 3, 5)]
    steps = (
        [(0, ids[0], 0), (1, ids[1], 0)],
        [(0, [9], 18), (1, [10], 3)],
        [(2, ids[2], 0), (0, [11], 19), (1, [12], 4)],
    )
    with open_engine(engine) as opened:
        executor = load_executor(opened, num_pages=PAGES * SMALL["max_batch_size"])
        try:
            return [executor.forward(packed_step(rows)).copy() for rows in steps]
        finally:
            executor.close()


def logits_of_gpu(engine: Path) -> list[np.ndarray]:
    """The driver is there only while it is asked: a build that finds one times its tactics on it."""
    before = driver.cu, replay.cu
    driver.cu = replay.cu = InterpretedCuda()
    driver.open_device.cache_clear()
    try:
        return logits_of(engine)
    finally:
        driver.cu, replay.cu = before
        driver.open_device.cache_clear()


def problems(name: str, folder: Path) -> list[str]:
    model = str(write_checkpoint(family_file(name), 0, folder / "model"))
    front_end, engines = FrontEnd(model), {}
    for target in ("cpu", "cuda:sm_90"):
        engines[target] = folder / f"{target}.engine"
        build_tiny(model, engines[target], target, folder / "timings.json", front_end, **SMALL)
    pairs = zip(logits_of_gpu(engines["cuda:sm_90"]), logits_of(engines["cpu"]), strict=True)
    found = []
    for index, (got, wanted) in enumerate(pairs):
        error, allowed = float(np.abs(got - wanted).max()), 2e-4 * max(1.0, float(np.abs(wanted).max()))
        if not error <= allowed:  # not a number is not below anything
            found.append(f"step {index}: logits differ by {error:.3g}, allowed are {allowed:.3g}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    teach_bfloat16()
    cuda_plan.compile_all = described
    for name in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            found = problems(name, Path(folder))
        sys.stdout.write(json.dumps({"family": name, "problems": found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
