"""Kernel of linear for many rows on Hopper: pairs of blocks that share the weight's tiles.

Written in Gluon, where clusters, barriers and asynchronous products are explicit. A cluster makes
2 * BLOCK_M rows by WIDTH weight rows: each block holds its own rows, and one copy brings a tile of
the weight to both, which halves what the second level cache has to give. One warp asks for tiles,
two warpgroups multiply; while these write a tile out, the next one's operands are on their way.
"""
# mypy: disable-error-code="no-untyped-def, no-redef"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import cluster, mbarrier, tma

from tapeout.plugins.activation.triton import activate
from tapeout.plugins.linear.triton_gemm import tile_of
from tapeout.plugins.triton_aot.overlap import take_turn
from tapeout.plugins.triton_aot.ring import advance, wait


@gluon.jit
def address_of(barriers):
    """Where this block's barriers lie, 8 bytes each.

    Used by address because the compiler would put a barrier of all consumers around every use of a
    descriptor. What it hands to assembly is the address in the cluster's first block.
    """
    return gl.inline_asm(
        """{
        .reg .b32 rank;
        mov.u32 rank, %cluster_ctarank;
        mapa.shared::cluster.u32 $0, $1, rank;
        }""",
        "=r,r",
        [barriers],
        gl.int32,
    )


@gluon.jit
def release(barriers, index):
    """Arrive once a warp at this block's barrier and at its peer's: both write into both blocks' slots."""
    gl.inline_asm(
        """{
        .reg .pred first;
        .reg .b32 rank, there;
        elect.sync _|first, 0xffffffff;
        mov.u32 rank, %cluster_ctarank;
        @first mbarrier.arrive.shared::cta.b64 _, [$0];
        xor.b32 rank, rank, 1;
        mapa.shared::cluster.u32 there, $0, rank;
        @first mbarrier.arrive.shared::cluster.b64 _, [there];
        }""",
        "r",
        [barriers + index * 8],
    )


@gluon.jit
def produce(
    T, a_tiles, b_tiles, a_ring, b_ring, full, empty,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, RING: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Bring the operands of all tiles of this cluster."""
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_m = gl.cdiv(T, ROWS)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            a, b, arrived = a_ring.index(slot), b_ring.index(slot), full.index(slot)
            mbarrier.expect(arrived, a.nbytes_per_cta + b.nbytes_per_cta)
            tma.async_load(a_tiles, [m * ROWS, k], arrived, a)
            if GATED:
                tma.async_load(b_tiles, [0, n * BLOCK_N, k], arrived, b, multicast=True)
            else:
                tma.async_load(b_tiles, [n * BLOCK_N, k], arrived, b, multicast=True)
            slot, phase = advance(slot, phase, RING)


@gluon.jit
def halves(value, ROWS: gl.constexpr, HALF: gl.constexpr):
    """The left and the right half of a tile [ROWS, 2 * HALF]."""
    return gl.split(value.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))


@gluon.jit
def free_way_out():
    """Wait until the copy engine has read what was last sent."""
    tma.store_wait(0)
    gl.barrier()


@gluon.jit
def write_out(value, way_out, out_tiles, row, column):
    """Send outputs through shared memory, which is free, to the copy engine."""
    way_out.store(value)
    hopper.fence_async_shared()
    gl.barrier()
    tma.async_store(out_tiles, [row, column], way_out)


@gluon.jit
def ask_residual(residual_tiles, way_out, arrived, row, column):
    """Start copying what is added to outputs to the place from where they leave."""
    free_way_out()
    mbarrier.expect(arrived, way_out.nbytes_per_cta)
    tma.async_load(residual_tiles, [row, column], arrived, way_out)


@gluon.jit
def write_with_residual(value, way_out, arrived, phase, out_tiles, row, column, kind: gl.constexpr):
    """`write_out` of value + residual, once that has arrived."""
    mbarrier.wait(arrived, phase)
    residual = way_out.load(value.type.layout).to(gl.float32)
    gl.barrier()
    write_out((value.to(kind).to(gl.float32) + residual).to(kind), way_out, out_tiles, row, column)


@gluon.jit
def with_bias(value, bias, column, N: gl.constexpr, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        columns = column + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
        value += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def consume(
    T, out, bias, residual_tiles, out_tiles, a_ring, b_ring, way_out, residual_full, full, empty,
    N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, RING: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles of this cluster and write them out."""
    GATED: gl.constexpr = ACTIVATION != ""
    WIDTH: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    HALF: gl.constexpr = WIDTH // 2
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    kind: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16], PAIR)
    tiles_m = gl.cdiv(T, ROWS)
    full, empty = address_of(full), address_of(empty)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    before = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * TILES_N, gl.num_programs(0)):
        m, n = tile_of(tile, tiles_m, TILES_N, GROUP_M)
        row, column = m * ROWS, n * BLOCK_N
        if HAS_RESIDUAL:
            ask_residual(residual_tiles, way_out, residual_full, row, column)
        total = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        for k in range(0, K, BLOCK_K):
            wait(full, slot, phase)
            b = b_ring.index(slot).reshape([WIDTH, BLOCK_K])
            total = hopper.warpgroup_mma(a_ring.index(slot), b.permute((1, 0)), total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=[total])
            if k > 0:
                release(empty, before)
            before = slot
            slot, phase = advance(slot, phase, RING)
        total = hopper.warpgroup_mma_wait(0, deps=[total])
        release(empty, before)
        left, right = halves(total, ROWS, HALF)
        if GATED:
            left = with_bias(left, bias, column, N, HAS_BIAS)
            right = with_bias(right, bias + N, column, N, HAS_BIAS)
            gate = activate(left.to(kind).to(gl.float32), ACTIVATION).to(kind).to(gl.float32)
            free_way_out()
            write_out((gate * right.to(kind).to(gl.float32)).to(kind), way_out, out_tiles, row, column)
        else:
            left = with_bias(left, bias, column, N, HAS_BIAS)
            right = with_bias(right, bias, column + HALF, N, HAS_BIAS)
            if HAS_RESIDUAL:
                write_with_residual(left, way_out, residual_full, 0, out_tiles, row, column, kind)
                ask_residual(residual_tiles, way_out, residual_full, row, column + HALF)
                write_with_residual(right, way_out, residual_full, 1, out_tiles, row, column + HALF, kind)
            else:
                free_way_out()
                write_out(left.to(kind), way_out, out_tiles, row, column)
                free_way_out()
                write_out(right.to(kind), way_out, out_tiles, row, column + HALF)
    tma.store_wait(0)


@gluon.jit
def paired(
    x, weight, bias, residual, out, counts, x_row, residual_row, out_row,
    COUNT: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, RING: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """BLOCK_M rows a block, two blocks a cluster. Grid: any number of clusters, which share the tiles."""
    T = take_turn(counts, COUNT, OVERLAP)
    GATED: gl.constexpr = ACTIVATION != ""
    ROWS: gl.constexpr = 2 * BLOCK_M
    kind: gl.constexpr = x.dtype.element_ty
    PAIR: gl.constexpr = [[1, 0]]
    OUT_N: gl.constexpr = BLOCK_N if GATED else BLOCK_N // 2
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], kind, cga_layout=PAIR)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, OUT_N], kind, cga_layout=PAIR)
    a_tiles = tma.make_tensor_descriptor(x, [T, K], [x_row, 1], [ROWS, BLOCK_K], a_layout)
    out_tiles = tma.make_tensor_descriptor(out, [T, N], [out_row, 1], [ROWS, OUT_N], out_layout)
    residual_tiles = out_tiles
    if HAS_RESIDUAL:
        residual_tiles = tma.make_tensor_descriptor(
            residual, [T, N], [residual_row, 1], [ROWS, OUT_N], out_layout
        )
    if GATED:
        b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [2, BLOCK_N, BLOCK_K], kind, cga_layout=[[0, 0, 0]]
        )
        b_tiles = tma.make_tensor_descriptor(
            weight, [2, N, K], [N * K, K, 1], [2, BLOCK_N, BLOCK_K], b_layout
        )
        b_ring = gl.allocate_shared_memory(kind, [RING, 2, BLOCK_N, BLOCK_K], b_layout)
    else:
        b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [BLOCK_N, BLOCK_K], kind, cga_layout=[[0, 0]]
        )
        b_tiles = tma.make_tensor_descriptor(weight, [N, K], [K, 1], [BLOCK_N, BLOCK_K], b_layout)
        b_ring = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_K], b_layout)
    a_ring = gl.allocate_shared_memory(kind, [RING, ROWS, BLOCK_K], a_layout)
    way_out = gl.allocate_shared_memory(kind, [ROWS, OUT_N], out_layout)
    full = mbarrier.allocate_mbarrier(RING)
    empty = mbarrier.allocate_mbarrier(RING)
    residual_full = mbarrier.allocate_mbarrier()
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 16)  # the consuming warps of both blocks
    mbarrier.init(residual_full, 1)
    cluster.barrier()
    gl.warp_specialize(
        [
            (consume, (
                T, out, bias, residual_tiles, out_tiles, a_ring, b_ring, way_out, residual_full, full,
                empty, N, K, ROWS, BLOCK_N, BLOCK_K, GROUP_M, RING, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, PAIR,
            )),
            (produce, (
                T, a_tiles, b_tiles, a_ring, b_ring, full, empty, N, K, ROWS, BLOCK_N, BLOCK_K, GROUP_M, RING,
                GATED,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
    cluster.barrier()  # a block that ends takes its shared memory along, into which the other may arrive
