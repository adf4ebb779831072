"""Context attention for Hopper: one warpgroup loads, the others multiply and exponentiate.

Written in Gluon, where layouts, barriers and asynchronous products are explicit. A consumer
warpgroup owns 64 rows (queries times heads of one kv head) and issues the products of the next
keys before it exponentiates the present scores; consumers take turns at issuing, so that one's
exponentials run beside another's products. Keys and values pass through one ring of tiles in the
order K0, K1, V0, K2, V1, ...
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tapeout.plugins.triton_aot.overlap import take_turn
from tapeout.plugins.triton_aot.ring import advance, wait

#: Consumer warpgroups of a block; the turns below are written for two.
CONSUMERS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def address_of(barriers):
    """Where barriers lie, 8 bytes each. The consumers' hot loop uses them by address: the compiler would
    put a barrier of the warpgroup around every use of a descriptor."""
    return gl.inline_asm("mov.b32 $0, $1;", "=r,r", [barriers], gl.int32)


@gluon.jit
def release(barriers, index):
    """Arrive once a warp; having waited for its own products, no warp waits for another."""
    gl.inline_asm(
        """{
        .reg .pred first;
        elect.sync _|first, 0xffffffff;
        @first mbarrier.arrive.shared::cta.b64 _, [$0];
        }""",
        "r",
        [barriers + index * 8],
    )


@gluon.jit
def await_turn(INDEX: gl.constexpr):
    """Wait until the other consumer has passed the turn on.

    Hardware barriers 8 and 9 of both consumers' threads; the compiler numbers its own upwards from 0.
    """
    if INDEX == 0:
        gl.inline_asm("bar.sync 8, 256;")
    else:
        gl.inline_asm("bar.sync 9, 256;")


@gluon.jit
def pass_turn(INDEX: gl.constexpr):
    """Let consumer INDEX issue its products."""
    if INDEX == 0:
        gl.inline_asm("bar.arrive 8, 256;")
    else:
        gl.inline_asm("bar.arrive 9, 256;")


@gluon.jit
def tile_at(turn, T, HEAD_BLOCKS: gl.constexpr, BLOCK_Q: gl.constexpr):
    """First row and head block of this program's tile of a turn, the longest rows first; row < 0: none.

    Programs walk the list to and fro, which evens out their work.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    place = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    block = gl.cdiv(T, BLOCK_Q) - 1 - place // HEAD_BLOCKS
    return block * BLOCK_Q, place % HEAD_BLOCKS


@gluon.jit
def blocks_of(first, last, seq, cu_q, kv_lens, BLOCK_N: gl.constexpr):
    """How the rows of a sequence in [first, last) walk its keys.

    Returns (start_row, earlier, own, masked, partial, count). Steps: `masked` of the `own` blocks of
    the step's rows, from the last one down; the `partial` (0 or 1) last block of the `earlier` tokens;
    own blocks without a mask; full blocks of earlier tokens. `count` of all, 0 for a sequence of one row.
    """
    start_row = gl.load(cu_q + seq)
    end_row = gl.load(cu_q + seq + 1)
    earlier = gl.load(kv_lens + seq) - (end_row - start_row)
    top = gl.maximum(first, start_row)
    own = gl.cdiv(gl.minimum(last, end_row) - start_row, BLOCK_N)
    masked = gl.maximum(own - (top - start_row + 1) // BLOCK_N, 1)
    partial = gl.where(earlier % BLOCK_N != 0, 1, 0)
    count = gl.where(end_row - start_row > 1, own + gl.cdiv(earlier, BLOCK_N), 0)
    return start_row, earlier, own, masked, partial, count


@gluon.jit
def load_earlier(
    tile, kv_pool, pages, plane, token, earlier, layers, layer, kv_head,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Start copying cached tokens [token, token + BLOCK_N) below `earlier` into a tile; zeros beyond."""
    ROWS: gl.constexpr = PAGE if PAGE < 32 else 32
    LANES: gl.constexpr = DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    offset = row[:, None] * DIM + d[None, :]
    for part in gl.static_range(BLOCK_N // ROWS):
        at = token + part * ROWS
        page = gl.load(pages + at // PAGE, mask=at < earlier, other=0).to(gl.int64)
        base = (page * layers + layer) * (2 * KV_HEADS * PAGE * DIM) + (
            plane + kv_head * PAGE + at % PAGE
        ) * DIM
        inside = (row < earlier - at)[:, None] & (d < DIM)[None, :]
        async_copy.async_load(tile.slice(part * ROWS, ROWS, 0), kv_pool + base + offset, inside)
    async_copy.commit_group()


@gluon.jit
def produce(
    T, key_tiles, value_tiles, query_tiles, queries, ring, query_full, query_empty, full, empty,
    cu_q, kv_lens, row_seqs, page_table, kv_pool, layers, layer, max_pages,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    HEADS_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Bring queries, keys and values of all tiles of this program."""
    ROWS: gl.constexpr = 64 // HEADS_BLOCK
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    HEAD_BLOCKS: gl.constexpr = HEADS // HEADS_BLOCK
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    query_phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    first, head_block = tile_at(turn, T, HEAD_BLOCKS, BLOCK_Q)
    while first >= 0:
        kv_head = head_block * HEADS_BLOCK // (HEADS // KV_HEADS)
        last = gl.minimum(first + BLOCK_Q, T)
        last_seq = gl.load(row_seqs + last - 1)
        asked = gl.to_tensor(0)
        for seq in range(gl.load(row_seqs + first), last_seq + 1):
            start_row, earlier, own, masked, partial, count = blocks_of(
                first, last, seq, cu_q, kv_lens, BLOCK_N
            )
            if (count > 0) & (asked == 0):
                asked += 1
                for c in gl.static_range(CONSUMERS):
                    mbarrier.wait(query_empty.index(c), query_phase ^ 1)
                    mbarrier.expect(query_full.index(c), 64 * DIM * 2)
                    tma.async_load(
                        query_tiles, [first + c * ROWS, head_block * HEADS_BLOCK, 0], query_full.index(c),
                        queries.index(c),
                    )  # fmt: skip
                query_phase ^= 1
            pages = page_table + seq * max_pages
            pending = gl.to_tensor(-1)
            for load in range(2 * count):
                is_key = (load == 0) | ((load % 2 == 1) & (load < 2 * count - 1))
                value_step = gl.where(load == 2 * count - 1, count - 1, load // 2 - 1)
                step = gl.where(is_key, (load + 1) // 2, value_step)
                is_partial = (step >= masked) & (step < masked + partial)
                is_own = (step < own + partial) & (is_partial == 0)
                mbarrier.wait(empty.index(slot), phase ^ 1)
                if is_own:
                    at = own - 1 - gl.where(step < masked, step, step - partial)
                    row = start_row + at * BLOCK_N
                    mbarrier.expect(full.index(slot), BLOCK_N * DIM * 2)
                    if is_key:
                        tma.async_load(key_tiles, [row, kv_head, 0], full.index(slot), ring.index(slot))
                    else:
                        tma.async_load(value_tiles, [row, kv_head, 0], full.index(slot), ring.index(slot))
                    if pending >= 0:
                        async_copy.wait_group(0)
                        hopper.fence_async_shared()
                        gl.barrier()
                        mbarrier.arrive(full.index(pending))
                    pending = gl.to_tensor(-1)
                else:
                    at = gl.where(is_partial, earlier // BLOCK_N, step - own - partial)
                    plane = gl.where(is_key, 0, KV_HEADS * PAGE)
                    tile = ring.index(slot).reshape([BLOCK_N, DIM])
                    load_earlier(
                        tile, kv_pool, pages, plane, at * BLOCK_N, earlier, layers, layer, kv_head,
                        KV_HEADS, DIM, PAGE, BLOCK_N,
                    )  # fmt: skip
                    if pending >= 0:
                        async_copy.wait_group(1)
                        hopper.fence_async_shared()
                        gl.barrier()
                        mbarrier.arrive(full.index(pending))
                    pending = slot
                slot, phase = advance(slot, phase, RING)
            if pending >= 0:
                async_copy.wait_group(0)
                hopper.fence_async_shared()
                gl.barrier()
                mbarrier.arrive(full.index(pending))
        turn += 1
        first, head_block = tile_at(turn, T, HEAD_BLOCKS, BLOCK_Q)


@gluon.jit
def scores_of(queries, tile, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Start queries times keys."""
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout)
    return hopper.warpgroup_mma(queries, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def exponentials(scores, m, scale, bound, MASKED: gl.constexpr):
    """(new maximum, factor on what was summed before, weights [64, N])."""
    if MASKED:
        column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(column[None, :] <= bound[:, None], scores, float("-inf"))
    highest = gl.maximum(m, gl.max(scores, axis=1) * scale)
    safe = highest
    if MASKED:
        safe = gl.where(highest == float("-inf"), 0.0, highest)  # nothing visible yet
    return highest, gl.exp2(m - safe), gl.exp2(scores * scale - safe[:, None])


@gluon.jit
def sums_of(weights):
    """Sums [64, 4] of the parts of each row that one thread holds: no thread asks another."""
    parts = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, axis=3), axis=1)


@gluon.jit
def step_of(
    queries, ring, full, empty, slot, phase, m, total, acc, weights, scale, bound,
    INDEX: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
    RING: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr, kind: gl.constexpr,
):  # fmt: skip
    """Scores of the next keys beside the weighted sum of the present values."""
    value_slot, value_phase = advance(slot, phase, RING)
    wait(full, slot, phase)
    wait(full, value_slot, value_phase)
    await_turn(INDEX)
    token = scores_of(queries, ring.index(slot).reshape([BLOCK_N, DIM]), BLOCK_N, layout)
    p = gl.convert_layout(weights.to(kind), gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = hopper.warpgroup_mma(p, ring.index(value_slot).reshape([BLOCK_N, DIM]), acc, is_async=True)
    pass_turn(1 - INDEX)
    scores = hopper.warpgroup_mma_wait(1, deps=[token])
    release(empty, slot)
    m, keep, weights = exponentials(scores, m, scale, bound, MASKED)
    total = total * gl.convert_layout(keep, gl.SliceLayout(1, total.type.layout))[:, None] + sums_of(weights)
    wait(full, value_slot, value_phase)  # has passed: keeps the assembler from waiting early
    acc, weights = hopper.warpgroup_mma_wait(0, deps=[acc, weights])
    release(empty, value_slot)
    acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, acc.type.layout))[:, None]
    slot, phase = advance(value_slot, value_phase, RING)
    return slot, phase, m, total, acc, weights


@gluon.jit
def consume(
    T, out, queries, ring, query_full, query_empty, full, empty, cu_q, kv_lens, row_seqs,
    out_row, out_group, scale,
    INDEX: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, HEADS_BLOCK: gl.constexpr,
    BLOCK_N: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Attend for the INDEX-th 64 rows of all tiles of this program."""
    ROWS: gl.constexpr = 64 // HEADS_BLOCK
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    HEAD_BLOCKS: gl.constexpr = HEADS // HEADS_BLOCK
    kind: gl.constexpr = out.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    LANES: gl.constexpr = DIM // 8
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    local = gl.arange(0, 64, row_layout) // HEADS_BLOCK
    place = gl.arange(0, 64, gl.SliceLayout(1, out_layout))
    d = gl.arange(0, DIM, gl.SliceLayout(0, out_layout))
    full, empty = address_of(full), address_of(empty)
    query_full, query_empty = address_of(query_full), address_of(query_empty)
    mine = queries.index(INDEX).reshape([64, DIM])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    query_phase = gl.to_tensor(0)
    if INDEX == 1:
        pass_turn(0)
    turn = gl.to_tensor(0)
    first, head_block = tile_at(turn, T, HEAD_BLOCKS, BLOCK_Q)
    while first >= 0:
        last = gl.minimum(first + BLOCK_Q, T)
        last_seq = gl.load(row_seqs + last - 1)
        asked = gl.to_tensor(0)
        for seq in range(gl.load(row_seqs + first), last_seq + 1):
            start_row, earlier, own, masked, partial, count = blocks_of(
                first, last, seq, cu_q, kv_lens, BLOCK_N
            )
            if count > 0:
                if asked == 0:
                    wait(query_full, INDEX, query_phase)
                    query_phase ^= 1
                asked += 1
                limit = first + INDEX * ROWS + local - start_row
                wait(full, slot, phase)
                token = scores_of(mine, ring.index(slot).reshape([BLOCK_N, DIM]), BLOCK_N, score_layout)
                scores = hopper.warpgroup_mma_wait(0, deps=[token])
                release(empty, slot)
                slot, phase = advance(slot, phase, RING)
                m = gl.full([64], float("-inf"), gl.float32, row_layout)
                m, _, weights = exponentials(scores, m, scale, limit - (own - 1) * BLOCK_N, True)
                total = sums_of(weights)
                acc = gl.zeros([64, DIM], gl.float32, acc_layout)
                for step in range(1, masked + partial):
                    bound = limit - (own - 1 - step) * BLOCK_N
                    bound = gl.where(step < masked, bound, earlier % BLOCK_N - 1)
                    slot, phase, m, total, acc, weights = step_of(
                        mine, ring, full, empty, slot, phase, m, total, acc, weights, scale,
                        bound, INDEX, BLOCK_N, DIM, RING, True, score_layout, kind,
                    )  # fmt: skip
                for _step in range(masked + partial, count):
                    slot, phase, m, total, acc, weights = step_of(
                        mine, ring, full, empty, slot, phase, m, total, acc, weights, scale,
                        limit, INDEX, BLOCK_N, DIM, RING, False, score_layout, kind,
                    )  # fmt: skip
                if seq == last_seq:
                    release(query_empty, INDEX)
                wait(full, slot, phase)
                p = gl.convert_layout(weights.to(kind), weight_layout)
                acc = hopper.warpgroup_mma(p, ring.index(slot).reshape([BLOCK_N, DIM]), acc, is_async=True)
                acc, p = hopper.warpgroup_mma_wait(0, deps=[acc, p])
                release(empty, slot)
                slot, phase = advance(slot, phase, RING)
                share = gl.convert_layout(1.0 / gl.sum(total, axis=1), gl.SliceLayout(1, acc_layout))
                result = gl.convert_layout((acc * share[:, None]).to(kind), out_layout)
                row = first + INDEX * ROWS + place // HEADS_BLOCK
                head = head_block * HEADS_BLOCK + place % HEADS_BLOCK
                real = (row >= start_row) & (row < gl.minimum(last, gl.load(cu_q + seq + 1)))
                target = out + (row.to(gl.int64) * out_row + head * out_group)[:, None] + d[None, :]
                gl.store(target, result, mask=real[:, None])
            elif (seq == last_seq) & (asked > 0):
                release(query_empty, INDEX)
        turn += 1
        first, head_block = tile_at(turn, T, HEAD_BLOCKS, BLOCK_Q)


@gluon.jit
def specialized_context(
    q, k, v, out, counts, cu_q, kv_lens, row_seqs, page_table, kv_pool,
    q_row, q_group, k_row, k_group, v_row, v_group, out_row, out_group, scale, layers, layer, max_pages,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    HEADS_BLOCK: gl.constexpr, BLOCK_N: gl.constexpr, RING: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """`packed_context` without window, softcap and sinks. Grid: any number of programs, which share tiles."""
    T = take_turn(counts, 0, OVERLAP)
    ROWS: gl.constexpr = 64 // HEADS_BLOCK
    kind: gl.constexpr = q.dtype.element_ty
    query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEADS_BLOCK, DIM], kind)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 1, DIM], kind)
    query_tiles = tma.make_tensor_descriptor(
        q, [T, HEADS, DIM], [q_row, q_group, 1], [ROWS, HEADS_BLOCK, DIM], query_layout
    )
    key_tiles = tma.make_tensor_descriptor(
        k, [T, KV_HEADS, DIM], [k_row, k_group, 1], [BLOCK_N, 1, DIM], tile_layout
    )
    value_tiles = tma.make_tensor_descriptor(
        v, [T, KV_HEADS, DIM], [v_row, v_group, 1], [BLOCK_N, 1, DIM], tile_layout
    )
    queries = gl.allocate_shared_memory(kind, [CONSUMERS, ROWS, HEADS_BLOCK, DIM], query_layout)
    ring = gl.allocate_shared_memory(kind, [RING, BLOCK_N, 1, DIM], tile_layout)
    query_full = mbarrier.allocate_mbarrier(CONSUMERS)
    query_empty = mbarrier.allocate_mbarrier(CONSUMERS)
    full = mbarrier.allocate_mbarrier(RING)
    empty = mbarrier.allocate_mbarrier(RING)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(query_full.index(i), 1)
        mbarrier.init(query_empty.index(i), 4)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 4 * CONSUMERS)
    gl.warp_specialize(
        [
            (consume, (
                T, out, queries, ring, query_full, query_empty, full, empty, cu_q, kv_lens, row_seqs,
                out_row, out_group, scale, 0, HEADS, DIM, HEADS_BLOCK, BLOCK_N, RING,
            )),
            (consume, (
                T, out, queries, ring, query_full, query_empty, full, empty, cu_q, kv_lens, row_seqs,
                out_row, out_group, scale, 1, HEADS, DIM, HEADS_BLOCK, BLOCK_N, RING,
            )),
            (produce, (
                T, key_tiles, value_tiles, query_tiles, queries, ring, query_full, query_empty, full, empty,
                cu_q, kv_lens, row_seqs, page_table, kv_pool, layers, layer, max_pages, HEADS, KV_HEADS, DIM,
                PAGE, HEADS_BLOCK, BLOCK_N, RING,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
