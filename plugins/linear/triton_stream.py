"""Kernels of linear for some rows: the weight streams through the copy engine without a pause.

The work is cut into units, one step of K of one tile, in tile order; every block takes an equal run of
them, wherever tiles begin and end. So all blocks end together and none waits for its pipeline to
fill but once. A tile that several blocks share is the sum of their parts, which `reduce_parts` adds in
order. Parts lie as [MAX_PARTS, T, ROWS], ROWS being the weight's.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.linear.epilogue import epilogue
from tapeout.plugins.linear.triton import fetch_rows
from tapeout.plugins.triton_aot.overlap import let_next_start, take_turn, wait_for_earlier


@triton.jit
def share_of(tiles_m, TILES_N: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr):
    """Units a block takes."""
    return tl.cdiv(tiles_m * (TILES_N * STEPS), BLOCKS)


@triton.jit
def streamed(
    x, weight, partial, counts, x_row,
    COUNT: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Parts of x @ weight.T. Grid (BLOCKS,). Asks for AHEAD columns of its first tile before its turn."""
    let_next_start(OVERLAP)
    T = tl.load(counts + COUNT)
    tiles_m = tl.cdiv(T, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(ROWS, BLOCK_N)
    STEPS: tl.constexpr = tl.cdiv(K, BLOCK_K)
    share = share_of(tiles_m, TILES_N, STEPS, BLOCKS)
    block = tl.program_id(0)
    begin = block * share
    end = tl.minimum(begin + share, tiles_m * (TILES_N * STEPS))
    if OVERLAP:
        ahead = begin // STEPS // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
        fetch_rows(weight, ahead, begin % STEPS * BLOCK_K, ROWS, K, AHEAD)
    wait_for_earlier(OVERLAP)
    # The scratch of descriptors is one for all launches: nothing is written there ahead of the turn.
    a_tiles = tl.make_tensor_descriptor(x, [T, K], [x_row, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(weight, [ROWS, K], [K, 1], [BLOCK_N, BLOCK_K])
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for unit in tl.range(begin, end):
        tile, step = unit // STEPS, unit % STEPS
        row, column = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
        a = a_tiles.load([row, step * BLOCK_K])
        b = b_tiles.load([column, step * BLOCK_K])
        total = tl.dot(a, b.T, total)
        if (step == STEPS - 1) | (unit == end - 1):
            part = block - tile * STEPS // share
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            at = partial + (part * T + rows).to(tl.int64)[:, None] * ROWS + columns[None, :]
            tl.store(at, total, mask=(rows < T)[:, None] & (columns < ROWS)[None, :])
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def sum_of_parts(
    partial,
    row,
    columns,
    inside,
    tile,
    share,
    T,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Float32 sums of the parts of a tile at `columns` of one row."""
    first = tile * STEPS // share
    last = (tile * STEPS + STEPS - 1) // share
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(last - first + 1):
        total += tl.load(partial + (part * T + row).to(tl.int64) * ROWS + columns, mask=inside, other=0.0)
    return total


@triton.jit
def reduce_parts(
    partial, bias, residual, out, counts, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Outputs from the parts. Grid (rows, blocks of BLOCK columns, BLOCK being a divisor of BLOCK_N)."""
    T = take_turn(counts, COUNT, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    GATED: tl.constexpr = ACTIVATION != ""
    ROWS: tl.constexpr = 2 * N if GATED else N
    TILES_N: tl.constexpr = tl.cdiv(ROWS, BLOCK_N)
    STEPS: tl.constexpr = tl.cdiv(K, BLOCK_K)
    tiles_m = tl.cdiv(T, BLOCK_M)
    share = share_of(tiles_m, TILES_N, STEPS, BLOCKS)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < N
    tile = first // BLOCK_N * tiles_m + row // BLOCK_M
    gate = sum_of_parts(partial, row, columns, inside, tile, share, T, ROWS, STEPS, BLOCK)
    up = gate
    if GATED:
        tile = (N + first) // BLOCK_N * tiles_m + row // BLOCK_M
        up = sum_of_parts(partial, row, columns + N, inside, tile, share, T, ROWS, STEPS, BLOCK)
    result = epilogue(
        gate, up, bias, residual, columns, row, inside, inside, residual_row,
        out.dtype.element_ty, N, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out + row.to(tl.int64) * out_row + columns, result, mask=inside)
