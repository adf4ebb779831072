"""Kernel of layer_norm: one block per row and group, the row in registers."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def layer_norm(
    x, out, weight, bias, counts, eps, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    value = tl.load(x + row.to(tl.int64) * x_row + group * x_group + columns, mask=inside, other=0.0)
    value = value.to(tl.float32)
    value = tl.where(inside, value - tl.sum(value, axis=0) / DIM, 0.0)
    result = value * tl.rsqrt(tl.sum(value * value, axis=0) / DIM + eps)
    result = result * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    target = out + row.to(tl.int64) * out_row + group * out_group + columns
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
