"""Do a program's operands lie as CUDA kernels load them?"""

from __future__ import annotations

from tapeout.compiler.cuda_plan import ROW_MULTIPLE
from tapeout.plugins.errors import UnsupportedError
from tapeout.runtime.engine.container import DTYPES
from tapeout.runtime.engine.program import Program


def check_alignment(program: Program) -> None:
    """Raise UnsupportedError, all offenders listed, for views whose rows do not start on 16 bytes, or have
    elements that are not side by side."""
    offsets = {b.name: b.offset_bytes for b in program.buffers}
    problems = []
    for index, record in enumerate(program.records):
        for view in (*record.inputs, *record.outputs):
            start = offsets.get(view.buffer, 0) + view.offset * DTYPES[view.dtype][1]
            # A vector's rows are single elements: kernels load them one by one. So are those of groups of
            # groups, whose only kernels are those of copies.
            strides = view.strides[:1] if len(view.shape) > 3 else view.strides[:-1]
            rows_apart = len(view.shape) > 1 and any(s % ROW_MULTIPLE for s in strides)
            spread = view.strides[-1] != 1 and record.op != "copy"
            if start % 16 or rows_apart or spread:
                problems.append(
                    f"record {index} ({record.op}): {view.buffer} {view.dtype}{list(view.shape)}, "
                    f"strides {list(view.strides)}, offset {view.offset}"
                )
    if problems:
        raise UnsupportedError(
            "operands that do not start at multiples of 16 bytes, or whose rows or heads are no multiples "
            f"of {ROW_MULTIPLE} elements, have no CUDA kernels:\n" + "\n".join(f"  {p}" for p in problems),
            hint="--target cpu runs such models",
        )
