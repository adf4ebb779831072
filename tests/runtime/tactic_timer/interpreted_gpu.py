# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A GPU whose kernels run in Triton's interpreter: `python interpreted_gpu.py JOB...`

A program of its own, because TRITON_INTERPRET must be set before kernels are imported; the folders of
fake_cuda.py, interpret_cuda.py and fake_kernels.py belong on PYTHONPATH. For each job it packs one op and
gives the pack to the timing worker; "cubins" are descriptions of kernels. Prints what the worker tells,
a message a line, after one that names the entry and its candidates.

A job: {"op": op, "case": words of a case's label, "places": [[kind, rows]], "take": how many candidates,
"provider": of the candidates ("native"), "step": how often the op stands in a whole step (there is none),
"spoil": {number of a candidate, or -1 for the reference: how}}. How is `wrong` (another value), `outside` (a
guard is written), `unwritten`, `cache` (another layer is written), `raises` (the launch fails). Products of
cuBLASLt are those of the library that STUB_CUBLASLT names (stub_cublaslt.py), whose later algorithms are the
faster ones; without it there is none.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import torch
from fake_cuda import Launched
from fake_kernels import compile_nothing
from idle_gpu import IdleCuda
from interpret_cuda import patch_once, teach_bfloat16
from stub_cublaslt import CALL, SYMBOL, capture_calls, compute, kernel_of

from tapeout.compiler.tactics import gpu_pack
from tapeout.compiler.tactics.gpu_contests import Contest, contests
from tapeout.compiler.tactics.gpu_steps import StepContest
from tapeout.plugins.case import cases
from tapeout.plugins.cuda import CUBLASLT, NATIVE, CudaTarget, KernelSpec
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.tactic_check.hashed import normals
from tapeout.plugins.triton_aot import CompiledKernel
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda import cublaslt, driver
from tapeout.runtime.tactic_timer import device, timing, whole_step, worker
from tapeout.runtime.tactic_timer.checking import Checker
from tapeout.runtime.tactic_timer.pack import Candidate

LIMITS = Limits(max_batch_size=4, max_num_tokens=8, max_seq_len=48, tokens_per_page=16)
TARGET = CudaTarget(90, 4, 232448, LIMITS.tokens_per_page)
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
_SPECS: dict[bytes, KernelSpec] = {}
_NOTHING = (ctypes.c_uint8 * 16)()


def described(specs: Sequence[KernelSpec], sm: int, **options: Any) -> list[CompiledKernel]:
    done = compile_nothing(specs, sm, **options)
    _SPECS.update((kernel.cubin, spec) for kernel, spec in zip(done, specs, strict=True))
    return done


class InterpretedCuda(IdleCuda):
    """Runs every launch when it is queued or first replayed; a block takes 100 microseconds."""

    def __init__(self) -> None:
        super().__init__(free=1 << 28)
        self._modules: dict[int, KernelSpec] = {}
        self._took_us: dict[int, float] = {}
        self.on_launch = self._run
        self.products: ctypes.CDLL | None = None

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Any, ...]:
        result = super().cuModuleLoadData(cubin)
        self._modules[result[1]] = _SPECS[cubin]
        return result

    def cuModuleGetFunction(self, module: int, symbol: bytes) -> tuple[Any, ...]:
        return self._done("cuModuleGetFunction", module)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        if graph in self._took_us:  # it would do the same again, and blocks cost milliseconds here
            self.spend(self._took_us[graph])
            return self._done("cuGraphLaunch")
        before = self.now_us
        result = super().cuGraphLaunch(graph, stream)
        self._took_us[graph] = self.now_us - before
        return result

    def _run(self, launched: Launched) -> None:
        if launched.symbol == SYMBOL:
            assert self.products is not None
            ran = map(kernel_of, self.launched_outside)
            assert kernel_of(launched) in ran, "a product was captured that had not run before"
            compute(self.products, launched)
            self.spend(50 - 10 * dict(zip(CALL, launched.values, strict=True))["algorithm"])
            return
        spec: KernelSpec = self._modules[launched.symbol]  # type: ignore[index]
        self.spend(100 * launched.grid[0] * launched.grid[1] * launched.grid[2])
        if spec.function in {"fill_normal", "fill_cache"}:
            fill(spec, launched)
            return
        arguments = {}
        for (name, kind), value in zip(spec.signature, launched.values, strict=False):
            if kind.startswith("*"):
                assert value == 0 or self.holds(int(value)), (spec.function, name)
                value = _at(int(value), _TORCH[kind[1:]])
            arguments[name] = value
        kernel = getattr(importlib.import_module(spec.module), spec.function)
        extra = {"OVERLAP": False} if "OVERLAP" in kernel.arg_names else {}
        kernel[launched.grid](**arguments, **spec.constants, **extra)


def fill(spec: KernelSpec, launched: Launched) -> None:
    """In numpy, which is faster; tests/plugins/test_tactic_check.py shows that it is the same."""
    a = dict(zip((name for name, _ in spec.signature), launched.values, strict=False))
    dtype, blocks = _TORCH[spec.signature[0][1][1:]], launched.grid[0]
    if spec.function == "fill_normal":
        rows, columns, stride = blocks // a["blocks"], a["columns"], a["row_stride"]
        values = normals(a["seed"], np.arange(rows), np.arange(columns), a["scale"])
        memory = _memory(a["out"], (rows - 1) * stride + columns, dtype)
        memory.as_strided((rows, columns), (stride, 1)).copy_(torch.from_numpy(values))
        return
    heads2, elements = a["heads2"], a["page_elements"]
    pages = blocks // heads2 // a["blocks"]
    values = normals(a["seed"], np.arange(pages * heads2), np.arange(elements), a["scale"])
    values = values.reshape(pages, heads2, elements)
    for page, used in enumerate(_memory(a["used"], pages, torch.int32).tolist()):
        values[page, :, used * a["dim"] :] = np.nan
    pool = _memory(a["pool"], pages * a["layers"] * heads2 * elements, dtype)
    pool.reshape(pages, a["layers"], heads2, elements)[:, a["layer"]] = torch.from_numpy(values)


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """Four bytes at an address: the interpreter takes the pointer and asks for no more. They are as many for
    all types, since it takes pointers of two types to one address for one storage."""
    memory = (ctypes.c_uint8 * 4).from_address(address or ctypes.addressof(_NOTHING))
    return torch.frombuffer(memory, dtype=dtype)


class SpoilingChecker(Checker):
    """What a wrong kernel would do, done after a right one; float32 outputs."""

    spoil: dict[int, str] = {}  # noqa: RUF012

    def _run(self, candidate: Candidate, outputs: Any, pool: int) -> None:
        super()._run(candidate, outputs, pool)
        hashes = [c.kernel_hash for c in self._entry.candidates]
        number = -1 if outputs is self._wanted else hashes.index(candidate.kernel_hash)
        how, out = self.spoil.get(number), outputs[0]
        if how == "raises":
            raise TapeoutError("CUDA: launching a kernel: CUDA_ERROR_INVALID_VALUE (made up by a test)")
        at = {
            "wrong": (out.address, 1e6),
            "unwritten": (out.address + 4 * out.row_stride, float("nan")),
            "outside": (out.address + 4 * out.columns, 0.0),
            "cache": (pool, 1.0),
        }
        if how is not None:
            address, value = at[how]
            ctypes.c_float.from_address(address).value = value


def decisions(job: dict[str, Any]) -> list[Contest]:
    types = next(c.signature for c in cases(job["op"]) if job["case"] in c.label)
    found = contests({types.key(): types}, LIMITS, TARGET, providers={NATIVE, CUBLASLT})
    chosen = [c for c in found if [c.kind, c.rows] in job["places"]]

    def some(contest: Contest) -> Contest:
        """Some of those that can be tried here, each with kernels of its own, promising ones and others."""
        provider = job.get("provider", NATIVE)
        able = {
            c.kernel_hash: c
            for c in contest.contenders
            if c.provider == provider and (provider != NATIVE or c.chosen.tactic.interpretable)
        }
        step = max(1, len(able) // job["take"])
        return replace(contest, contenders=tuple(list(able.values())[::step][: job["take"]]))

    return [some(c) for c in chosen]


def main() -> None:
    torch.set_num_threads(1)
    teach_bfloat16()
    patch_once()
    gpu_pack.compile_all = described
    fake = InterpretedCuda()
    driver.cu = device.cu = fake
    worker.Checker = SpoilingChecker
    stub = os.environ.get("STUB_CUBLASLT")
    cublaslt._places = lambda file, wheel: [stub] if stub and file in stub else []
    if stub:
        fake.products = ctypes.CDLL(stub)
        kept = capture_calls(fake.products, fake)
        assert kept
    # Interpreted blocks cost milliseconds.
    timing._MAX_COPIES = timing._FIRST_CALLS = 2
    timing._REPLAYS = timing._MIN_REPLAYS = 1
    timing._GRAPH_US = worker._WARM_UP_US = 0.0
    whole_step._MAX_TURNS, timing._ROUNDS, timing._MIN_ROUNDS = 2, 1, 1
    gpu = driver.Device(0)
    for job in map(json.loads, sys.argv[1:]):
        SpoilingChecker.spoil = {int(c): how for c, how in job.get("spoil", {}).items()}
        found = decisions(job)
        steps = [
            StepContest(c.kind, c.rows, "", (c,) * job["step"], frozenset()) for c in found if "step" in job
        ]
        file = gpu_pack.make_pack(found, LIMITS, TARGET, "cuda:sm_90", steps=steps)
        timer = worker.Worker(file, gpu, device.l2_bytes(0), _tell)
        for index, entry in enumerate(file.pack.entries):
            names = [c.tactic for c in entry.candidates]
            _tell({"event": "title", "kind": entry.kind, "rows": entry.rows, "candidates": names})
            timer.run(index, {})
        for index in range(len(file.pack.steps)):
            timer.run_step(index)
        timer.close()
        _tell({"event": "end", "open": fake.open})


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
