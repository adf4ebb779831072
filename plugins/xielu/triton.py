"""Kernel of xielu."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import activate
from tapeout.plugins.triton_aot.elementwise import at
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def expm1(x):
    """exp(x) - 1 of a float32: a series near 0, where the difference would cancel."""
    series = 1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7)))))
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1.0)


@triton.jit
def xielu(
    x, out, alpha_p, alpha_n, beta, eps, counts, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = xielu(x), computed in float32."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    value = tl.load(x + at(row, columns, x_row, x_group, GROUPS, DIM), mask=inside).to(tl.float32)
    slope = tl.load(beta).to(tl.float32)
    rise = activate(tl.load(alpha_p).to(tl.float32), "softplus")
    fall = slope + activate(tl.load(alpha_n).to(tl.float32), "softplus")
    below = tl.minimum(value, tl.load(eps).to(tl.float32))
    curve = tl.where(value > 0, rise * value * value, fall * (expm1(below) - value))
    tl.store(
        out + at(row, columns, out_row, out_group, GROUPS, DIM),
        (curve + slope * value).to(out.dtype.element_ty), mask=inside,
    )  # fmt: skip
