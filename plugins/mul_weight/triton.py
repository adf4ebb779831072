"""Kernel of mul_weight."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.elementwise import at
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def mul_weight(
    x, out, weight, counts, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHT_STEP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x * weight in float32, rounded once; WEIGHT_STEP 0: one weight for all elements."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    value = tl.load(x + at(row, columns, x_row, x_group, GROUPS, DIM), mask=inside).to(tl.float32)
    factor = tl.load(weight + columns % DIM * WEIGHT_STEP, mask=inside).to(tl.float32)
    tl.store(
        out + at(row, columns, out_row, out_group, GROUPS, DIM),
        (value * factor).to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
