"""Kernels that fill operands with hashed values (see hashed.py) and compare results.

All sizes are run-time arguments: one cubin for each element type serves every operand. A program
works on BLOCK elements of one row.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_BYTES_MEAN: tl.constexpr = tl.constexpr(510)


@triton.jit
def mixed(word):
    """lowbias32 of uint32 words."""
    word = word ^ (word >> 16)
    word = word * tl.full((), 0x7FEB352D, tl.uint32)
    word = word ^ (word >> 15)
    word = word * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def hashed(seed, row, column):
    """uint32 words of one row's elements."""
    start = mixed(row.to(tl.uint32) * tl.full((), 0x9E3779B1, tl.uint32) + seed.to(tl.uint32))
    return mixed(start ^ (column.to(tl.uint32) * tl.full((), 0x85EBCA6B, tl.uint32)))


@triton.jit
def about_normal(word, scale):
    """float32: the sum of a word's four bytes, around zero, times scale."""
    total = (word & 0xFF) + ((word >> 8) & 0xFF) + ((word >> 16) & 0xFF) + (word >> 24)
    return (total.to(tl.int32) - _BYTES_MEAN).to(tl.float32) * scale


@triton.jit
def fill_normal(out, columns, row_stride, blocks, seed, scale, BLOCK: tl.constexpr):
    """Grid (rows * blocks,)."""
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    value = about_normal(hashed(seed, row, column), scale)
    tl.store(out + row.to(tl.int64) * row_stride + column, value.to(out.dtype.element_ty), column < columns)


@triton.jit
def fill_integers(out, columns, row_stride, blocks, seed, high, BLOCK: tl.constexpr):
    """Grid (rows * blocks,). Values from 0 to high - 1."""
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    value = hashed(seed, row, column) % high.to(tl.uint32)
    tl.store(out + row.to(tl.int64) * row_stride + column, value.to(tl.int32), column < columns)


@triton.jit
def fill_cache(
    pool, used, heads2, page_elements, dim, blocks, layers, layer, seed, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """One layer of a KV pool [pages, layers, 2, kv_heads, tokens, dim]. Grid (pages * heads2 * blocks,).

    heads2: 2 * kv_heads; page_elements: tokens * dim. Page p holds `used[p]` tokens; NaN follows.
    """
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks  # row: of [pages, 2 * kv_heads]
    page, head = row // heads2, row % heads2
    element = block * BLOCK + tl.arange(0, BLOCK)
    value = about_normal(hashed(seed, row, element), scale)
    value = tl.where(element // dim < tl.load(used + page), value, float("nan"))
    start = ((page.to(tl.int64) * layers + layer) * heads2 + head) * page_elements
    tl.store(pool + start + element, value.to(pool.dtype.element_ty), element < page_elements)


@triton.jit
def compare(
    got, wanted, result, rows, columns, row_stride, blocks, absolute, relative, BLOCK: tl.constexpr
):  # fmt: skip
    """Compare two outputs with a guard row before and guard elements behind each row. Grid (rows * blocks,).

    result: int32 [4], added to: elements beyond the tolerance (NaN is), elements written outside,
    bits of the largest error, elements that are NaN. What nobody wrote is NaN, or -1 of integers.
    """
    row = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = column < row_stride
    at = row.to(tl.int64) * row_stride + column
    raw = tl.load(got + at, there, other=0)
    value = raw.to(tl.float32)
    if raw.dtype == tl.int32:
        empty = raw == -1
    else:
        empty = value != value
    want = tl.load(wanted + at, there, other=0).to(tl.float32)
    inside = there & (row >= 1) & (row <= rows) & (column < columns)
    error = tl.abs(value - want)
    bad = inside & ~(error <= absolute + relative * tl.abs(want))
    outside = there & ~inside & ~empty
    missing = inside & empty
    largest = tl.max(tl.where(inside & (error == error), error, 0.0), axis=0)
    bad_count = tl.sum(bad.to(tl.int32), axis=0)
    outside_count = tl.sum(outside.to(tl.int32), axis=0)
    missing_count = tl.sum(missing.to(tl.int32), axis=0)
    tl.atomic_add(result, bad_count, bad_count > 0)
    tl.atomic_add(result + 1, outside_count, outside_count > 0)
    # Errors are not negative: their bits order as they do.
    tl.atomic_max(result + 2, largest.to(tl.int32, bitcast=True), largest > 0.0)
    tl.atomic_add(result + 3, missing_count, missing_count > 0)


@triton.jit
def compare_cache(got, wanted, result, elements, absolute, relative, BLOCK: tl.constexpr):
    """Add the number of elements beyond the tolerance to result[0]; NaN equals NaN. Grid (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < elements
    value = tl.load(got + at, there, other=0.0).to(tl.float32)
    want = tl.load(wanted + at, there, other=0.0).to(tl.float32)
    close = tl.abs(value - want) <= absolute + relative * tl.abs(want)
    both_empty = (value != value) & (want != want)
    count = tl.sum((there & ~(close | both_empty)).to(tl.int32), axis=0)
    tl.atomic_add(result, count, count > 0)
