"""What the linear kernels do with a product: bias, gated activation, residual, one rounding each.

The roundings are those of the ops a fused one stands for, so that fusing changes no bit.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import activate


@triton.jit
def epilogue(
    value, up, bias, residual, columns, rows, in_columns, inside, residual_row,
    KIND: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The output (KIND) of float32 products at `columns` and `rows`, whose shapes broadcast.

    With an activation, `value` is the gate and `up` the product N columns further.
    """
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)
    result = value.to(KIND)
    if ACTIVATION != "":
        if HAS_BIAS:
            up += tl.load(bias + N + columns, mask=in_columns, other=0.0).to(tl.float32)
        gate = activate(result.to(tl.float32), ACTIVATION).to(KIND).to(tl.float32)
        result = (gate * up.to(KIND).to(tl.float32)).to(KIND)
    if HAS_RESIDUAL:
        at = residual + rows.to(tl.int64) * residual_row + columns
        result = (result.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(KIND)
    return result


@triton.jit
def finish(
    value, up, bias, residual, out, partial, columns, rows, in_columns, inside, split, T,
    residual_row, out_row, N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store outputs; with splits this split's partial sums [SPLITS, T, N], or 2 N with an activation."""
    if SPLITS > 1:
        WIDTH: tl.constexpr = N if ACTIVATION == "" else 2 * N
        at = partial + (split * T + rows).to(tl.int64) * WIDTH + columns
        tl.store(at, value, mask=inside)
        if ACTIVATION != "":
            tl.store(at + N, up, mask=inside)
    else:
        result = epilogue(
            value, up, bias, residual, columns, rows, in_columns, inside, residual_row,
            out.dtype.element_ty, N, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
        )  # fmt: skip
        tl.store(out + rows.to(tl.int64) * out_row + columns, result, mask=inside)
