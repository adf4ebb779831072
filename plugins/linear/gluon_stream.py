"""Kernel of linear for some rows: one wave of blocks, each with a ring of weight pieces on their way.

Written in Gluon, where rings and barriers are explicit: a block starts to fill its ring before its
turn, while the launches ahead still run, and refills a slot as soon as it is multiplied. The caller
makes blocks so large that exactly a wave of them fits on the device, each with the same share of the
weight: that, and bytes on their way, are what bandwidth asks for.
"""
# mypy: disable-error-code="no-untyped-def, no-redef"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tapeout.plugins.linear.epilogue import finish
from tapeout.plugins.triton_aot.overlap import let_next_start, wait_for_earlier
from tapeout.plugins.triton_aot.ring import advance


@gluon.jit
def copy_piece(ring, full, slot, source, offsets, wanted):
    """Start copying a piece into a slot; its barrier is told when this and all before it are there."""
    async_copy.async_load(ring.index(slot), source + offsets, wanted)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def copy_weights(
    gates, ups, full, slot, source, offsets, wanted, up_distance: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """`copy_piece` of the weight, where it is gated of gates and ups."""
    if GATED:
        async_copy.async_load(ups.index(slot), source + up_distance + offsets, wanted)
    copy_piece(gates, full, slot, source, offsets, wanted)


@gluon.jit
def multiply(values, weights, total, MATRIX: gl.constexpr):
    """total + values @ weights.T, done on return. MATRIX: layout of the sums."""
    if MATRIX.version[0] == 3:
        total = hopper.warpgroup_mma(values, weights.permute((1, 0)), total, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=[total])
    else:
        a = values.load(gl.DotOperandLayout(0, MATRIX, 2))
        b = weights.permute((1, 0)).load(gl.DotOperandLayout(1, MATRIX, 2))
        total = mma_v2(a, b, total)
    return total


@gluon.jit
def streamed(
    x, weight, bias, residual, out, partial, counts, x_row, residual_row, out_row,
    COUNT: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, SHARE: gl.constexpr, SPLITS: gl.constexpr, RING: gl.constexpr, EARLY: gl.constexpr,
    X_RING: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """BLOCK_T rows by SHARE (at most BLOCK_N) outputs a block. Grid (shares, row blocks, splits).

    EARLY slots are filled before the turn. From 64 rows on a warpgroup multiplies.
    """
    let_next_start(OVERLAP)
    kind: gl.constexpr = x.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = BLOCK_T >= 64
    GATED: gl.constexpr = ACTIVATION != ""
    LANES: gl.constexpr = min(BLOCK_K // 8, 32)
    HALF: gl.constexpr = BLOCK_K // 2
    STEPS: gl.constexpr = (K // BLOCK_K + SPLITS - 1) // SPLITS
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    if WIDE:
        matrix: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [4, WARPS // 4] if BLOCK_T == 64 else [WARPS, 1],
            [16, BLOCK_N // (WARPS // 4) if BLOCK_T == 64 else BLOCK_N, 16],
        )  # fmt: skip
        x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_T, BLOCK_K], kind)
        weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], kind)
    else:
        matrix: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
        x_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        weight_layout: gl.constexpr = x_layout
    values = gl.allocate_shared_memory(kind, [X_RING, BLOCK_T, BLOCK_K], x_layout)
    gates = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_K], weight_layout)
    ups = gates
    if GATED:
        ups = gl.allocate_shared_memory(kind, [RING, BLOCK_N, BLOCK_K], weight_layout)
    full = mbarrier.allocate_mbarrier(RING)
    x_full = mbarrier.allocate_mbarrier(X_RING)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), 32 * WARPS)
    for i in gl.static_range(X_RING):
        mbarrier.init(x_full.index(i), 32 * WARPS)
    gl.barrier()

    split = gl.program_id(2)
    first, first_row = gl.program_id(0) * SHARE, gl.program_id(1) * BLOCK_T
    steps = gl.minimum(STEPS, K // BLOCK_K - split * STEPS)
    depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))[None, :]
    local = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    wanted = ((local < SHARE) & (first + local < N))[:, None]
    weight_at = (local * K)[:, None] + depth
    weight += first.to(gl.int64) * K + split * (STEPS * BLOCK_K)
    for i in gl.static_range(EARLY):
        copy_weights(gates, ups, full, i, weight + i * BLOCK_K, weight_at, wanted & (i < steps), N * K, GATED)
    T = gl.load(counts + COUNT)
    wait_for_earlier(OVERLAP)
    row = first_row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, copied))
    real = (row < T)[:, None]
    x_at = (row * x_row)[:, None] + depth
    x += split * (STEPS * BLOCK_K)
    # Pieces are asked for in the order of their use, because a barrier waits for all asked for before.
    for i in gl.static_range(RING):
        if i >= EARLY:
            mine = wanted & (i < steps)
            copy_weights(gates, ups, full, i, weight + i * BLOCK_K, weight_at, mine, N * K, GATED)
        if i < X_RING:
            copy_piece(values, x_full, i, x + i * BLOCK_K, x_at, real & (i < steps))

    gate = gl.zeros([BLOCK_T, BLOCK_N], gl.float32, matrix)
    up = gate
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    x_slot = gl.to_tensor(0)
    x_phase = gl.to_tensor(0)
    for step in range(steps):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(x_full.index(x_slot), x_phase)
        if WIDE:
            hopper.fence_async_shared()
        piece = values.index(x_slot)
        block = gates.index(slot)
        if GATED:
            gate = multiply(piece, block, gate, matrix)
            up = multiply(piece, ups.index(slot), up, matrix)
        elif WIDE:
            gate = multiply(piece, block, gate, matrix)
        else:  # two sums, because a product waits for the one before into the same sum
            gate = multiply(piece.slice(0, HALF, 1), block.slice(0, HALF, 1), gate, matrix)
            up = multiply(piece.slice(HALF, HALF, 1), block.slice(HALF, HALF, 1), up, matrix)
        gl.barrier()  # the slot is free
        if step + RING < steps:
            source = weight + (step + RING) * BLOCK_K
            copy_weights(gates, ups, full, slot, source, weight_at, wanted, N * K, GATED)
        if step + X_RING < steps:
            copy_piece(values, x_full, x_slot, x + (step + X_RING) * BLOCK_K, x_at, real)
        slot, phase = advance(slot, phase, RING)
        x_slot, x_phase = advance(x_slot, x_phase, X_RING)

    if not GATED and not WIDE:
        gate += up
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, matrix))
    in_columns = ((columns < SHARE) & (first + columns < N))[None, :]
    rows = (first_row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, matrix)))[:, None]
    finish(
        gate, up, bias, residual, out, partial, (first + columns)[None, :], rows, in_columns,
        in_columns & (rows < T), split, T, residual_row, out_row, N, SPLITS, HAS_BIAS, ACTIVATION,
        HAS_RESIDUAL,
    )  # fmt: skip
