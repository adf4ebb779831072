"""Run CUDA tactics in Triton's interpreter on the CPU: `python interpret_cuda.py OP[/TACTIC]...`

A program of its own, because TRITON_INTERPRET must be set before kernels are imported. Prints
one JSON object a case: {"op", "tactic", "case", "rows", "problem", "error"}.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch
from cuda_cases import Bound, bind

from tapeout.plugins.case import Case, cases
from tapeout.plugins.cuda import CudaTactic, CudaTarget, LaunchSpec
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.triton_aot.operands import grid_of

_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "i32": torch.int32}
#: Interpreted blocks cost milliseconds: cases with more rows than this are left to the GPU.
_MAX_ROWS = 220


def launch(spec: LaunchSpec, bound: Bound) -> None:
    kernel = getattr(importlib.import_module(spec.kernel.module), spec.kernel.function)
    values = []
    for (_, kind), arg in zip(spec.kernel.signature, spec.args, strict=True):
        value = bound.operands.value(arg)
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
            value = value[: value.numel() // 4 * 4].view(_TORCH[kind.removeprefix("*")])
        values.append(value)
    names = [name for name, _ in spec.kernel.signature]
    kernel[grid_of(spec, bound.bucket)](**dict(zip(names, values, strict=True)), **spec.kernel.constants)


def chosen(op: str, wanted: str) -> list[tuple[CudaTactic, Case, int]]:
    """Some cases of every tactic; all tactics of a family share kernels, so later ones get fewer."""
    found = []
    for tactic in cuda_tactics(op):
        if wanted and wanted not in tactic.name:
            continue
        for case in cases(op):
            target = CudaTarget(90, 4, 232448, case.tokens_per_page)
            decode = all(q == 1 for q, _ in case.sequences)
            if tactic.unsupported(case.signature, target) or (tactic.decode_only and not decode):
                continue
            for rows in dict.fromkeys((case.rows[0], case.rows[-1])):
                if rows <= _MAX_ROWS:
                    found.append((tactic, case, rows))
    return found


def main() -> None:
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        op, _, wanted = argument.partition("/")
        wanted, _, every = wanted.partition(":")
        for tactic, case, rows in itertools.islice(chosen(op, wanted), 0, None, int(every or 1)):
            target = CudaTarget(90, 4, 232448, case.tokens_per_page)
            bound = bind(case, rows, tactic, target)
            bound.poison()
            for spec in tactic.launches(case.signature, bound.bucket, target):
                launch(spec, bound)
            problem, error = bound.problem()
            line = {"op": op, "tactic": tactic.name, "case": case.label, "rows": rows, "problem": problem}
            print(json.dumps({**line, "error": error}), flush=True)


if __name__ == "__main__":
    main()
