"""Kernel of gated_activation."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import activate
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def gated_activation(
    x, out, counts, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = KIND(gate) rounded, times up, rounded; x = gate | up."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < DIM
    source = x + row.to(tl.int64) * x_row + columns
    gate = tl.load(source, mask=inside).to(tl.float32)
    up = tl.load(source + DIM, mask=inside).to(tl.float32)
    kind: tl.constexpr = out.dtype.element_ty
    value = activate(gate, KIND).to(kind).to(tl.float32) * up
    tl.store(out + row.to(tl.int64) * out_row + columns, value.to(kind), mask=inside)
