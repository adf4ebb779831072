"""Kernel of rope_table."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def rope_table(
    positions, inv_freq, out, counts, scaling, out_row,
    COUNT: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block per row: cosines, then sines, exact in range for any int32 position."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + columns, mask=inside, other=0.0)
    kind: tl.constexpr = out.dtype.element_ty
    target = out + row.to(tl.int64) * out_row + columns
    tl.store(target, (tl.cos(angle) * scaling).to(kind), mask=inside)
    tl.store(target + HALF, (tl.sin(angle) * scaling).to(kind), mask=inside)
