"""Kernels of linear for many rows: tiles of BLOCK_M rows by BLOCK_N outputs on the matrix units.

N counts outputs: with an activation the weight has 2 N rows, gates first, and a tile keeps two sums.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.linear.epilogue import epilogue, finish
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def tile_of(tile, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of the tile-th tile: GROUP_M rows of tiles at a time, so that both operands stay in L2."""
    in_group = GROUP_M * TILES_N
    first = (tile // in_group) * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % in_group) % size, (tile % in_group) // size


@triton.jit
def tiled(
    x, weight, bias, residual, out, counts, x_row, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile a block; works on every SM and in float32. Grid (tiles,)."""
    T = take_turn(counts, COUNT, OVERLAP)
    tiles_m = tl.cdiv(T, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0)
    if tile >= tiles_m * TILES_N:
        return
    m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
    rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end repeat the last one: no masks in the loop, never stored.
    source = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * x_row + offsets[None, :]
    gates = weight + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K + offsets[:, None]
    ups = gates + N * K
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    for k in range(0, K, BLOCK_K):
        left = offsets + k < K
        if K % BLOCK_K == 0:
            a, b = tl.load(source + k), tl.load(gates + k)
        else:
            a = tl.load(source + k, mask=left[None, :], other=0.0)
            b = tl.load(gates + k, mask=left[:, None], other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        if GATED:
            c = tl.load(ups + k) if K % BLOCK_K == 0 else tl.load(ups + k, mask=left[:, None], other=0.0)
            up = tl.dot(a, c, up, input_precision="ieee")
    inside = (rows < T)[:, None] & (columns < N)[None, :]
    finish(
        gate, up, bias, residual, out, out, columns[None, :], rows[:, None], (columns < N)[None, :], inside,
        0, T, residual_row, out_row, N, 1, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def halves(value, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """The left and the right half of a tile [BLOCK_M, 2 * HALF]."""
    return tl.split(tl.permute(tl.reshape(value, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit
def store_tile(
    value, up, bias, residual, out_tiles, row, column, T, residual_row,
    KIND: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile through the copy engine."""
    rows, columns = (row + tl.arange(0, BLOCK_M))[:, None], (column + tl.arange(0, BLOCK_N))[None, :]
    result = epilogue(
        value, up, bias, residual, columns, rows, columns < N, (rows < T) & (columns < N), residual_row, KIND,
        N, HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
    )  # fmt: skip
    out_tiles.store([row, column], result)


@triton.jit
def store_parts(
    value, bias, residual, out_tiles, row, column, T, residual_row,
    PARTS: tl.constexpr, KIND: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile in PARTS (a power of two) columns of it: the way out takes less shared memory."""
    if PARTS == 1:
        store_tile(
            value, value, bias, residual, out_tiles, row, column, T, residual_row, KIND, N, BLOCK_M, BLOCK_N,
            HAS_BIAS, "", HAS_RESIDUAL,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(value, BLOCK_M, HALF)
        store_parts(
            left, bias, residual, out_tiles, row, column, T, residual_row, PARTS // 2, KIND, N, BLOCK_M, HALF,
            HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        store_parts(
            right, bias, residual, out_tiles, row, column + HALF, T, residual_row, PARTS // 2, KIND, N,
            BLOCK_M, HALF, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def persistent(
    x, weight, bias, residual, out, counts, x_row, residual_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SUBTILES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One block a multiprocessor walks over tiles that the copy engine brings (SM 90 and above).

    Descriptors end at the real row count: the engine reads zeros and writes nothing beyond it. With an
    activation one tile of the weight holds BLOCK_N gates and their BLOCK_N ups, for one product.
    """
    T = take_turn(counts, COUNT, OVERLAP)
    GATED: tl.constexpr = ACTIVATION != ""
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    a_tiles = tl.make_tensor_descriptor(x, [T, K], [x_row, 1], [BLOCK_M, BLOCK_K])
    if GATED:
        b_tiles = tl.make_tensor_descriptor(weight, [2, N, K], [N * K, K, 1], [2, BLOCK_N, BLOCK_K])
    else:
        b_tiles = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    out_tiles = tl.make_tensor_descriptor(out, [T, N], [out_row, 1], [BLOCK_M, BLOCK_N // SUBTILES])
    tiles_m = tl.cdiv(T, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    kind: tl.constexpr = out.dtype.element_ty
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=True):
        m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
        row, column = m * BLOCK_M, n * BLOCK_N
        total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a = a_tiles.load([row, k * BLOCK_K])
            if GATED:
                b = b_tiles.load([0, column, k * BLOCK_K]).reshape(WIDTH, BLOCK_K)
            else:
                b = b_tiles.load([column, k * BLOCK_K])
            total = tl.dot(a, b.T, total)
        if GATED:
            gate, up = halves(total, BLOCK_M, BLOCK_N)
            store_tile(
                gate, up, bias, residual, out_tiles, row, column, T, residual_row, kind, N, BLOCK_M, BLOCK_N,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL,
            )  # fmt: skip
        else:
            store_parts(
                total, bias, residual, out_tiles, row, column, T, residual_row, SUBTILES, kind, N, BLOCK_M,
                BLOCK_N, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
