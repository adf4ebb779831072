"""Kernels of linear for many rows: tiles of BLOCK_M rows by BLOCK_N outputs on the matrix units."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def tile_of(tile, tiles_m, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n) of the tile-th tile: GROUP_M rows of tiles at a time, so that both operands stay in L2."""
    in_group = GROUP_M * TILES_N
    first = (tile // in_group) * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % in_group) % size, (tile % in_group) // size


@triton.jit
def tiled(
    x, weight, bias, out, counts, x_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile a block; works on every SM and in float32. Grid (tiles,)."""
    T = tl.load(counts + COUNT)
    tiles_m = tl.cdiv(T, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    if tile >= tiles_m * TILES_N:
        return
    m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
    rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the end repeat the last one: no masks in the loop, never stored.
    source = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * x_row + offsets[None, :]
    weights = weight + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * K + offsets[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a, b = tl.load(source + k), tl.load(weights + k)
        else:
            left = offsets + k < K
            a = tl.load(source + k, mask=left[None, :], other=0.0)
            b = tl.load(weights + k, mask=left[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    inside = (rows < T)[:, None] & (columns < N)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def persistent(
    x, weight, bias, out, counts, x_row, out_row,
    COUNT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, HAS_BIAS: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """One block a multiprocessor walks over tiles that the copy engine brings (SM 90 and above).

    Descriptors end at the real row count: the engine reads zeros and writes nothing beyond it.
    """
    T = tl.load(counts + COUNT)
    a_tiles = tl.make_tensor_descriptor(x, [T, K], [x_row, 1], [BLOCK_M, BLOCK_K])
    b_tiles = tl.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K])
    out_tiles = tl.make_tensor_descriptor(out, [T, N], [out_row, 1], [BLOCK_M, BLOCK_N // SUBTILES])
    tiles_m = tl.cdiv(T, BLOCK_M)
    TILES_N: tl.constexpr = tl.cdiv(N, BLOCK_N)
    kind: tl.constexpr = out.dtype.element_ty
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=True):
        m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
        row, column = m * BLOCK_M, n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a = a_tiles.load([row, k * BLOCK_K])
            b = b_tiles.load([column, k * BLOCK_K])
            total = tl.dot(a, b.T, total)
        if HAS_BIAS:
            columns = column + tl.arange(0, BLOCK_N)
            total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if SUBTILES == 2:  # half the shared memory for the way out leaves room for one more stage
            halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            out_tiles.store([row, column], left.to(kind))
            out_tiles.store([row, column + BLOCK_N // 2], right.to(kind))
        else:
            out_tiles.store([row, column], total.to(kind))
