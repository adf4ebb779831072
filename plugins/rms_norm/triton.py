"""Kernels of rms_norm and add_rms_norm: one block per row and group, the row in registers."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def weighted(
    normed, gain, weight_offset, KIND: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr
):
    """Float32 `normed` times the weight `gain`, rounded to KIND as the op's schema says."""
    if CAST_FIRST:
        if HAS_OFFSET:  # the sum is rounded to the weight's dtype, as the reference's is
            gain = (gain.to(tl.float32) + weight_offset).to(gain.dtype)
        return (normed.to(KIND).to(tl.float32) * gain.to(KIND).to(tl.float32)).to(KIND)
    return (normed * (weight_offset + gain.to(tl.float32))).to(KIND)


@triton.jit
def normalize(
    value, weight, columns, inside, eps, weight_offset, KIND: tl.constexpr,
    DIM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """RMS norm of float32 `value` (0 outside), in KIND."""
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    mean = tl.sum(value * value, axis=0) / DIM
    return weighted(value * tl.rsqrt(mean + eps), gain, weight_offset, KIND, CAST_FIRST, HAS_OFFSET)


@triton.jit
def rms_norm(
    x, out, weight, counts, eps, weight_offset, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    source = x + row.to(tl.int64) * x_row + group * x_group + columns
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    result = normalize(
        value, weight, columns, inside, eps, weight_offset, out.dtype.element_ty, DIM, CAST_FIRST, HAS_OFFSET
    )
    tl.store(out + row.to(tl.int64) * out_row + group * out_group + columns, result, mask=inside)


@triton.jit
def add_rms_norm(
    x, residual, out, total, weight, counts, eps, weight_offset,
    x_row, x_group, residual_row, residual_group, out_row, out_group, total_row, total_group,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """total = x + residual, rounded; out = rms_norm(total)."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    kind: tl.constexpr = out.dtype.element_ty
    row64 = row.to(tl.int64)
    left = tl.load(x + row64 * x_row + group * x_group + columns, mask=inside, other=0.0)
    right = tl.load(
        residual + row64 * residual_row + group * residual_group + columns, mask=inside, other=0.0
    )
    summed = (left.to(tl.float32) + right.to(tl.float32)).to(kind)
    tl.store(total + row64 * total_row + group * total_group + columns, summed, mask=inside)
    result = normalize(
        summed.to(tl.float32), weight, columns, inside, eps, weight_offset, kind, DIM, CAST_FIRST, HAS_OFFSET
    )
    tl.store(out + row64 * out_row + group * out_group + columns, result, mask=inside)
