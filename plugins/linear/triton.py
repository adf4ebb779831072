"""Kernels of linear for few rows: the weight is streamed once, the rows are cheap.

`gemv` multiplies and adds in registers, one row of x at a time; `skinny` uses the matrix units
with the weight as the tall operand and x padded to 16 rows. Both may split K over blocks, whose
partial sums `reduce_splits` adds in order.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def finish(
    value, columns, row, bias, out, partial, split, out_row, T, N: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, inside,
):  # fmt: skip
    """Store float32 results, or this split's partial sums [SPLITS, T, N]."""
    if SPLITS > 1:
        at = (split * T + row).to(tl.int64) * N + columns
        tl.store(partial + at, value, mask=inside)
    else:
        if HAS_BIAS:
            value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(out + row.to(tl.int64) * out_row + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemv(
    x, weight, bias, out, partial, counts, x_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row a block. Grid (columns, rows, splits)."""
    row = tl.program_id(1)
    T = tl.load(counts + COUNT)
    if row >= T:
        return
    split = tl.program_id(2)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    offsets = split * CHUNK + tl.arange(0, BLOCK_K)
    weights = weight + columns.to(tl.int64)[:, None] * K + offsets[None, :]
    source = x + row.to(tl.int64) * x_row + offsets
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, CHUNK, BLOCK_K):
        if K % BLOCK_K == 0 and K == CHUNK * SPLITS:
            values = tl.load(source + k)
            block = tl.load(weights + k, mask=(columns < N)[:, None], other=0.0)
        else:
            left = offsets + k < K
            values = tl.load(source + k, mask=left, other=0.0)
            block = tl.load(weights + k, mask=(columns < N)[:, None] & left[None, :], other=0.0)
        total += block.to(tl.float32) * values.to(tl.float32)[None, :]
    value = tl.sum(total, axis=1)
    finish(value, columns, row, bias, out, partial, split, out_row, T, N, SPLITS, HAS_BIAS, columns < N)


@triton.jit
def skinny(
    x, weight, bias, out, partial, counts, x_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_N outputs a block. Grid (columns, row blocks, splits)."""
    T = tl.load(counts + COUNT)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    if tl.program_id(1) * BLOCK_T >= T:
        return
    split = tl.program_id(2)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = K == CHUNK * SPLITS
    offsets = split * CHUNK + tl.arange(0, BLOCK_K)
    weights = weight + columns.to(tl.int64)[:, None] * K + offsets[None, :]
    source = x + rows.to(tl.int64)[None, :] * x_row + offsets[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in range(0, CHUNK, BLOCK_K):
        left = offsets + k < K
        row_mask = (rows < T)[None, :]
        column_mask = (columns < N)[:, None]
        if not EVEN:
            row_mask = row_mask & left[:, None]
            column_mask = column_mask & left[None, :]
        block = tl.load(weights + k, mask=column_mask, other=0.0)
        values = tl.load(source + k, mask=row_mask, other=0.0)
        total = tl.dot(block, values, total, input_precision="ieee")
    inside = (columns < N)[:, None] & (rows < T)[None, :]
    finish(
        total,
        columns[:, None],
        rows[None, :],
        bias,
        out,
        partial,
        split,
        out_row,
        T,
        N,
        SPLITS,
        HAS_BIAS,
        inside,
    )


@triton.jit
def reduce_splits(
    partial, bias, out, counts, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out = sum of the partial sums [SPLITS, T, N] in order, plus bias."""
    row = tl.program_id(0)
    T = tl.load(counts + COUNT)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    value = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        value += tl.load(partial + (split * T + row).to(tl.int64) * N + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_row + columns, value.to(out.dtype.element_ty), mask=inside)
