"""Kernels of linear for few rows: the weight is streamed once, the rows are cheap.

`gemv` multiplies and adds in registers, one row of x at a time; `skinny` uses the matrix units
with the weight as the tall operand and x padded to 16 rows. Both may split K over blocks, whose
partial sums `reduce_splits` adds in order. N counts outputs: with an activation the weight has
2 N rows, gates first.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.linear.epilogue import epilogue, finish
from tapeout.plugins.rms_norm.triton import weighted
from tapeout.plugins.triton_aot.overlap import fetch_to_l2, let_next_start, take_turn, wait_for_earlier


@triton.jit
def fetch_rows(weight, rows, first_k, ROWS: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for AHEAD columns (a multiple of the 64 in 128 bytes of bfloat16) of some weight rows."""
    k = tl.minimum(first_k + tl.arange(0, AHEAD // 64) * 64, K - 1)
    fetch_to_l2(weight + tl.minimum(rows, ROWS - 1).to(tl.int64)[:, None] * K + k[None, :])


@triton.jit
def weights_at(at, columns, left, N: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr):
    """A block of weight rows; zeros beyond N and, unless EVEN, where `left` is false."""
    if EVEN:
        if N % BLOCK_N == 0:
            return tl.load(at)
        return tl.load(at, mask=(columns < N)[:, None], other=0.0)
    return tl.load(at, mask=(columns < N)[:, None] & left[None, :], other=0.0)


@triton.jit
def row_factor(source, eps, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / root mean square of one row."""
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + tl.arange(0, BLOCK_K) < K
        value = tl.load(source + k + tl.arange(0, BLOCK_K), mask=inside, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def row_values(
    source, norm_weight, factor, weight_offset, offsets, left, EVEN: tl.constexpr, HAS_NORM: tl.constexpr,
    CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Float32 values of a row at `offsets`, normed and rounded as rms_norm does."""
    kind: tl.constexpr = source.dtype.element_ty
    if EVEN:
        value = tl.load(source + offsets).to(tl.float32)
    else:
        value = tl.load(source + offsets, mask=left, other=0.0).to(tl.float32)
    if HAS_NORM:
        gain = (
            tl.load(norm_weight + offsets) if EVEN else tl.load(norm_weight + offsets, mask=left, other=0.0)
        )
        value = weighted(value * factor, gain, weight_offset, kind, CAST_FIRST, HAS_OFFSET).to(tl.float32)
    return value


@triton.jit
def gemv(
    x, weight, bias, residual, norm_weight, out, partial, counts, eps, weight_offset,
    x_row, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of one row a block. Grid (columns, rows, splits).

    The next piece of the weight is always on its way, the first one before the launch ahead has ended;
    with AHEAD as many columns behind it are asked for then, too.
    """
    let_next_start(OVERLAP)
    row, split = tl.program_id(1), tl.program_id(2)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = CHUNK * SPLITS == K
    GATED: tl.constexpr = ACTIVATION != ""
    offsets = split * CHUNK + tl.arange(0, BLOCK_K)
    gates = weight + columns.to(tl.int64)[:, None] * K + offsets[None, :]
    ups = gates + N * K
    gate_block = weights_at(gates, columns, offsets < K, N, BLOCK_N, EVEN)
    up_block = gate_block
    if GATED:
        up_block = weights_at(ups, columns, offsets < K, N, BLOCK_N, EVEN)
    T = tl.load(counts + COUNT)
    if OVERLAP and AHEAD > 0:
        fetch_rows(weight, columns, split * CHUNK + BLOCK_K, N, K, AHEAD)
        if GATED:
            fetch_rows(weight + N * K, columns, split * CHUNK + BLOCK_K, N, K, AHEAD)
    wait_for_earlier(OVERLAP)
    if row >= T:
        return
    source = x + row.to(tl.int64) * x_row
    factor = 1.0
    if HAS_NORM:
        factor = row_factor(source, eps, K, BLOCK_K)
    gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up_sum = gate_sum
    for k in range(BLOCK_K, CHUNK, BLOCK_K):
        gate_next = weights_at(gates + k, columns, offsets + k < K, N, BLOCK_N, EVEN)
        up_next = gate_next
        if GATED:
            up_next = weights_at(ups + k, columns, offsets + k < K, N, BLOCK_N, EVEN)
        at = offsets + k - BLOCK_K
        values = row_values(
            source, norm_weight, factor, weight_offset, at, at < K, EVEN, HAS_NORM, CAST_FIRST, HAS_OFFSET
        )
        gate_sum += gate_block.to(tl.float32) * values[None, :]
        if GATED:
            up_sum += up_block.to(tl.float32) * values[None, :]
        gate_block, up_block = gate_next, up_next
    at = offsets + CHUNK - BLOCK_K
    values = row_values(
        source, norm_weight, factor, weight_offset, at, at < K, EVEN, HAS_NORM, CAST_FIRST, HAS_OFFSET
    )
    gate_sum += gate_block.to(tl.float32) * values[None, :]
    gate = tl.sum(gate_sum, axis=1)
    up = gate
    if GATED:
        up_sum += up_block.to(tl.float32) * values[None, :]
        up = tl.sum(up_sum, axis=1)
    finish(
        gate, up, bias, residual, out, partial, columns, row, columns < N, columns < N, split, T,
        residual_row, out_row, N, SPLITS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def skinny(
    x, weight, bias, residual, out, partial, counts, x_row, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by BLOCK_N outputs a block. Grid (columns, row blocks, splits).

    Asks for the first AHEAD columns of its weight rows before its turn.
    """
    let_next_start(OVERLAP)
    split = tl.program_id(2)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    CHUNK: tl.constexpr = tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K
    T = tl.load(counts + COUNT)
    if OVERLAP:
        fetch_rows(weight, columns, split * CHUNK, N, K, AHEAD)
        if ACTIVATION != "":
            fetch_rows(weight + N * K, columns, split * CHUNK, N, K, AHEAD)
    wait_for_earlier(OVERLAP)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    if tl.program_id(1) * BLOCK_T >= T:
        return
    EVEN: tl.constexpr = K == CHUNK * SPLITS
    GATED: tl.constexpr = ACTIVATION != ""
    offsets = split * CHUNK + tl.arange(0, BLOCK_K)
    gates = weight + columns.to(tl.int64)[:, None] * K + offsets[None, :]
    ups = gates + N * K
    # Rows beyond the end repeat the last one: they are never stored, and a mask costs registers.
    source = x + tl.minimum(rows, T - 1).to(tl.int64)[None, :] * x_row + offsets[:, None]
    gate = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up = gate
    for k in range(0, CHUNK, BLOCK_K):
        left = offsets + k < K
        block = weights_at(gates + k, columns, left, N, BLOCK_N, EVEN)
        if EVEN:
            values = tl.load(source + k)
        else:
            values = tl.load(source + k, mask=left[:, None], other=0.0)
        gate = tl.dot(block, values, gate, input_precision="ieee")
        if GATED:
            up = tl.dot(
                weights_at(ups + k, columns, left, N, BLOCK_N, EVEN), values, up, input_precision="ieee"
            )
    inside = (columns < N)[:, None] & (rows < T)[None, :]
    finish(
        gate, up, bias, residual, out, partial, columns[:, None], rows[None, :], (columns < N)[:, None],
        inside, split, T, residual_row, out_row, N, SPLITS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def reduce_splits(
    partial, bias, residual, out, counts, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The outputs from the sums of the partial sums, added in order. Grid (rows, blocks of columns)."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    WIDTH: tl.constexpr = N if ACTIVATION == "" else 2 * N
    gate = tl.zeros((BLOCK,), tl.float32)
    up = gate
    for split in tl.static_range(SPLITS):
        at = partial + (split * T + row).to(tl.int64) * WIDTH + columns
        gate += tl.load(at, mask=inside, other=0.0)
        if ACTIVATION != "":
            up += tl.load(at + N, mask=inside, other=0.0)
    result = epilogue(
        gate, up, bias, residual, columns, row, inside, inside, residual_row,
        out.dtype.element_ty, N, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out + row.to(tl.int64) * out_row + columns, result, mask=inside)
