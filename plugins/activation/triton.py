"""The activation functions on CUDA, and the kernel of activation."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.elementwise import at
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def sigmoid(x):
    """Of a float32; exact limits at both infinities."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Of a float32: a series near 0, where 2 * sigmoid(2 x) - 1 would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(tl.abs(x) < 0.25, series, 2.0 * sigmoid(2.0 * x) - 1.0)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """KIND of a float32 value; NaN stays NaN."""
    if KIND == "silu":
        result = x * sigmoid(x)
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        result = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        result = tl.where(x < 0, 0.0, x)
    elif KIND == "tanh":
        result = tanh(x)
    elif KIND == "relu2":
        kept = tl.where(x < 0, 0.0, x)
        result = kept * kept
    elif KIND == "quick_gelu":
        result = x * sigmoid(1.702 * x)
    elif KIND == "softplus":
        result = tl.where(x > 20.0, x, tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    else:
        tl.static_assert(KIND == "sigmoid", "unknown activation")
        result = sigmoid(x)
    return result


@triton.jit
def activation(
    x, out, counts, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = KIND(x), computed in float32."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    value = tl.load(x + at(row, columns, x_row, x_group, GROUPS, DIM), mask=inside).to(tl.float32)
    value = activate(value, KIND)
    tl.store(
        out + at(row, columns, out_row, out_group, GROUPS, DIM), value.to(out.dtype.element_ty), mask=inside
    )
