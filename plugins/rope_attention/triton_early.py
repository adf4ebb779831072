"""Kernel of rope_attention for steps that only decode, whose blocks ask for the cache ahead of their turn.

Keys and values of earlier tokens come from earlier steps, so a block loads its first ones while the
launches ahead still run, and holds them in registers: it takes so little shared memory that it finds room
beside a launch whose ring fills a multiprocessor, and that the launch behind it finds room, too. The
newest token's key and value never come from the cache: every block turns the key by itself, and the block
the token belongs to writes both.

How a block ends stands in decode_turned again: as a function of both it took that kernel 16 registers more on
SM 80.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.paged_attention.triton import add_sinks, decode_row, split_bounds
from tapeout.plugins.rope_attention.triton import turned_heads
from tapeout.plugins.rope_attention.triton_decode import add_tile, join_parts
from tapeout.plugins.triton_aot.overlap import let_next_start, wait_for_earlier


@triton.jit
def load_tile(
    plane_of_head, pages, start, end, layers, layer,
    PLANE: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Both halves of the keys [BLOCK_N, DIM / 2] and the values [BLOCK_N, DIM] of tokens below `end`."""
    HALF: tl.constexpr = DIM // 2
    token = start + tl.arange(0, BLOCK_N)
    inside = token < end
    page = tl.load(pages + token // PAGE, mask=inside, other=0).to(tl.int64)
    keys = plane_of_head + ((page * layers + layer) * (2 * PLANE) + token % PAGE * DIM)[:, None]
    pairs, d, inside = tl.arange(0, HALF)[None, :], tl.arange(0, DIM)[None, :], inside[:, None]
    first = tl.load(keys + pairs, mask=inside, other=0.0)
    second = tl.load(keys + HALF + pairs, mask=inside, other=0.0)
    return first, second, tl.load(keys + PLANE + d, mask=inside, other=0.0)


@triton.jit
def decode_early(
    q, k, v, table, q_norm, k_norm, out, sinks, partial, partial_ml, arrivals,
    counts, cu_q, kv_lens, row_seqs, page_table, kv_pool, eps, weight_offset,
    q_row, q_group, k_row, k_group, v_row, v_group, table_row, out_row, out_group,
    scale, softcap, window, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    MAX_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QK_NORM: tl.constexpr,
    CAST_FIRST: tl.constexpr, HAS_OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of sequences with one row. Grid (rows, kv heads, splits); DIM is a power of two.

    Parts as in decode_turned. Compiled without fusing products and sums: see rope.
    """
    let_next_start(OVERLAP)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, kv_len, mine = decode_row(row, counts, cu_q, kv_lens, row_seqs)
    begin, end = split_bounds(kv_len, split, window, SPLITS, WINDOW, BLOCK_N)
    end = tl.where(mine, end, begin)
    PLANE: tl.constexpr = KV_HEADS * PAGE * DIM
    pages, plane_of_head = page_table + seq * max_pages, kv_pool + kv_head * (PAGE * DIM)
    newest = kv_len - 1
    old_end = tl.minimum(end, newest)
    cached_first, cached_second, cached_values = load_tile(
        plane_of_head, pages, begin, old_end, layers, layer, PLANE, DIM, PAGE, BLOCK_N
    )
    wait_for_earlier(OVERLAP)
    if begin >= end:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    kind: tl.constexpr = q.dtype.element_ty
    cached: tl.constexpr = kv_pool.dtype.element_ty
    row64 = row.to(tl.int64)
    pairs, d, local = tl.arange(0, HALF)[None, :], tl.arange(0, DIM)[None, :], tl.arange(0, GROUP_BLOCK)
    all_pairs = pairs < HALF
    cos = tl.load(table + row64 * table_row + pairs).to(kind).to(tl.float32)
    sin = tl.load(table + row64 * table_row + HALF + pairs).to(kind).to(tl.float32)
    new_first, new_second = turned_heads(
        k + row64 * k_row + kv_head * k_group, k_norm, cos, sin, pairs, pairs + HALF, all_pairs, all_pairs,
        eps, weight_offset, DIM, QK_NORM, CAST_FIRST, HAS_OFFSET,
    )  # fmt: skip
    new_first, new_second = new_first.to(cached), new_second.to(cached)
    new_value = tl.load(v + row64 * v_row + kv_head * v_group + d).to(cached)
    if newest < end:
        page = tl.load(pages + newest // PAGE).to(tl.int64)
        at = plane_of_head + (page * layers + layer) * (2 * PLANE) + newest % PAGE * DIM
        tl.store(at + pairs, new_first)
        tl.store(at + HALF + pairs, new_second)
        tl.store(at + PLANE + d, new_value)
    heads = kv_head * GROUP + local
    inside = (local < GROUP)[:, None]
    q_first, q_second = turned_heads(
        q + row64 * q_row + heads[:, None] * q_group, q_norm, cos, sin, pairs, pairs + HALF,
        inside & all_pairs, all_pairs, eps, weight_offset, DIM, QK_NORM, CAST_FIRST, HAS_OFFSET,
    )  # fmt: skip
    m = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    acc = tl.zeros((GROUP_BLOCK, DIM), tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_new = (token == newest)[:, None]
        first = tl.where(is_new, new_first, cached_first).to(kind)
        second = tl.where(is_new, new_second, cached_second).to(kind)
        values = tl.where(is_new, new_value, cached_values).to(kind)
        cached_first, cached_second, cached_values = load_tile(  # the next ones, while these are used
            plane_of_head, pages, start + BLOCK_N, old_end, layers, layer, PLANE, DIM, PAGE, BLOCK_N
        )
        m, total, acc = add_tile(
            q_first, q_second, first, second, values, token, end, kv_len, scale, softcap, window, m, total,
            acc, WINDOW, SOFTCAP,
        )  # fmt: skip
    if SPLITS > 1:
        low = 0
        if WINDOW:
            low = tl.maximum(kv_len - window, 0) // BLOCK_N * BLOCK_N
        parts = tl.cdiv(kv_len - low, tl.cdiv(tl.cdiv(kv_len - low, SPLITS), BLOCK_N) * BLOCK_N)
        if parts > 1:
            at_head = (row64 * HEADS + heads) * SPLITS
            at_split = at_head + split
            tl.store(partial + at_split[:, None] * DIM + d, acc, mask=inside)
            tl.store(partial_ml + at_split * 2, m, mask=local < GROUP)
            tl.store(partial_ml + at_split * 2 + 1, total, mask=local < GROUP)
            tl.debug_barrier()  # all of the block's stores come before its arrival
            counter = arrivals + row * MAX_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") < parts - 1:
                return
            tl.atomic_xchg(counter, 0, sem="relaxed")  # for the next launch
            tl.debug_barrier()
            join_parts(
                out + row64 * out_row + kv_head * GROUP * out_group, sinks, partial, partial_ml,
                (row64 * HEADS + kv_head * GROUP) * SPLITS, kv_head * GROUP, parts, out_group,
                GROUP, GROUP_ROWS, SPLITS, DIM, SINKS,
            )  # fmt: skip
            return
    if SINKS:
        total, keep = add_sinks(m, total, sinks, heads, local < GROUP)
        acc = acc * keep[:, None]
    target = out + row64 * out_row + heads[:, None] * out_group + d
    tl.store(target, (acc / total[:, None]).to(kind), mask=inside)
