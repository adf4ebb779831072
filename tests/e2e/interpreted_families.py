# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A family's engine for a GPU, run from end to end without one: `python interpreted_families.py FAMILY...`

A program of its own, because TRITON_INTERPRET must be set before kernels are imported; the folders of
fake_cuda.py, fake_kernels.py, interpret_cuda.py and gpu_families.py belong on PYTHONPATH. The driver is made
of host memory, a "cubin" is the description of a kernel, and Triton's interpreter runs what is launched, at
the addresses and with the grids of the engine's launch table. Prints {"family", "problems"} a line: how the
answers differ from those of the CPU's engine.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fake_cuda import FakeCuda, Launched
from fake_kernels import compile_nothing
from gpu_cases import Answer, Case, differences
from gpu_families import LIMITS, answers_of, family_file
from interpret_cuda import _TORCH, teach_bfloat16
from make_families import _checkpoint, build_tiny

from tapeout.compiler import cuda_plan
from tapeout.compiler.front_end import FrontEnd
from tapeout.plugins.cuda import KernelSpec
from tapeout.plugins.triton_aot import CompiledKernel
from tapeout.runtime.executors.cuda import driver, replay

#: Interpreted blocks cost milliseconds: beyond one page, in chunks, and beside each other.
PROMPTS, NEW_TOKENS = (3, 20), 3
SMALL = {**LIMITS, "max_batch_size": 2, "max_num_tokens": 8, "max_seq_len": 32}
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
                value = _at(int(value), _TORCH[kind[1:]])
            arguments[name] = value
        kernel = getattr(importlib.import_module(spec.module), spec.function)
        extra = {"OVERLAP": False} if "OVERLAP" in kernel.arg_names else {}
        kernel[launched.grid](**arguments, **spec.constants, **extra)


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A few bytes at an address: the interpreter takes the pointer and asks for no more."""
    memory = (ctypes.c_uint8 * 8).from_address(address or ctypes.addressof(_NOTHING))
    return torch.frombuffer(memory, dtype=dtype)


def answers_of_gpu(engine: Path, case: Case) -> tuple[list[list[Answer]], set[str]]:
    """The driver is there only while it is asked: a build that finds one times its tactics on it."""
    before = driver.cu, replay.cu
    driver.cu = replay.cu = InterpretedCuda()
    driver.open_device.cache_clear()
    try:
        return answers_of(engine, case)
    finally:
        driver.cu, replay.cu = before
        driver.open_device.cache_clear()


def problems(name: str, folder: Path) -> list[str]:
    file = replace(family_file(name), prompt_lengths=PROMPTS, new_tokens=NEW_TOKENS)
    model = str(_checkpoint(file, 0, folder / "model"))
    front_end, engines = FrontEnd(model), {}
    for target in ("cpu", "cuda:sm_90"):
        engines[target] = folder / f"{target}.engine"
        build_tiny(model, engines[target], target, folder / "timings.json", front_end, **SMALL)
    case = file.case()
    wanted, _ = answers_of(engines["cpu"], case)
    got, kinds = answers_of_gpu(engines["cuda:sm_90"], case)
    missing = [f"no {kind} step" for kind in sorted(case.steps - kinds)]
    return differences(got, wanted) + missing


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
