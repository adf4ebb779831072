"""Kernels of add, mul, scale and copy, and how kernels address rows x groups x dim.

One block works on BLOCK elements of one row; element e of a row is (e // DIM, e % DIM).
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def at(row, columns, row_stride, group_stride, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """Element offsets of `columns` of a row."""
    base = row.to(tl.int64) * row_stride
    if GROUPS == 1:
        return base + columns
    return base + (columns // DIM) * group_stride + columns % DIM


@triton.jit
def binary(
    a, b, out, counts, a_row, a_group, b_row, b_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OP: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = a OP b, rounded once."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    left = tl.load(a + at(row, columns, a_row, a_group, GROUPS, DIM), mask=inside).to(tl.float32)
    right = tl.load(b + at(row, columns, b_row, b_group, GROUPS, DIM), mask=inside).to(tl.float32)
    value = left + right if OP == "add" else left * right
    tl.store(
        out + at(row, columns, out_row, out_group, GROUPS, DIM), value.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def scale(
    x, out, counts, factor, x_row, x_group, out_row, out_group,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x * factor in float32, rounded once."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    value = tl.load(x + at(row, columns, x_row, x_group, GROUPS, DIM), mask=inside).to(tl.float32) * factor
    tl.store(
        out + at(row, columns, out_row, out_group, GROUPS, DIM), value.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def copy(
    x, out, counts, x_row, x_group, out_row, out_group, x_step,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = x, whose elements are x_step apart: 0 where one is repeated."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * DIM
    source = x + row.to(tl.int64) * x_row + (columns // DIM) * x_group + (columns % DIM) * x_step
    value = tl.load(source, mask=inside)
    tl.store(out + at(row, columns, out_row, out_group, GROUPS, DIM), value, mask=inside)


@triton.jit
def copy_nested(
    x, out, counts, x_row, x_group, x_item, out_row, out_group, out_item, x_step,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, ITEMS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`copy` of rows x groups x items x dim."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < GROUPS * ITEMS * DIM
    group, item, d = columns // (ITEMS * DIM), columns // DIM % ITEMS, columns % DIM
    row64 = row.to(tl.int64)
    value = tl.load(x + row64 * x_row + group * x_group + item * x_item + d * x_step, mask=inside)
    tl.store(out + row64 * out_row + group * out_group + item * out_item + d, value, mask=inside)


@triton.jit
def gather(
    ids, table, out, counts, table_row, out_row,
    COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row] = table[ids[row]]: embedding and select_rows."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    source = tl.load(ids + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < DIM
    value = tl.load(table + source * table_row + columns, mask=inside)
    tl.store(out + row.to(tl.int64) * out_row + columns, value, mask=inside)
