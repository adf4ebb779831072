"""Kernel of rope_attention for steps that only decode: all of it in one launch.

The block that reads a row's newest token turns its key and writes it, with its value, to the cache
first. The last block of a row and kv head to end adds the others' parts up.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import tanh
from tapeout.plugins.paged_attention.triton import add_sinks, decode_row, split_bounds
from tapeout.plugins.rope_attention.triton import turned_heads
from tapeout.plugins.triton_aot.overlap import fetch_to_l2, let_next_start, wait_for_earlier

PARTS_AT_ONCE: tl.constexpr = tl.constexpr(8)


@triton.jit
def token_at(
    kv_pool, pages, token, newest, layers, layer, kv_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Where the keys of some tokens start, [N, 1]; of tokens beyond the newest that of the newest."""
    token = tl.minimum(token, newest)
    page = tl.load(pages + token // PAGE).to(tl.int64)
    at = (page * layers + layer) * (2 * KV_HEADS * PAGE * DIM) + (kv_head * PAGE + token % PAGE) * DIM
    return kv_pool + at[:, None]


@triton.jit
def join_parts(
    target, sinks, partial, partial_ml, first_part, first_head, parts, out_group,
    GROUP: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Outputs of a kv head's query heads from their parts, a few parts at a time so that loads overlap."""
    local, d, some = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, PARTS_AT_ONCE)
    there = local < GROUP
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + some
        inside = (part < parts)[:, None] & there[None, :]
        at = first_part + local[None, :] * SPLITS + part[:, None]
        part_m = tl.load(partial_ml + at * 2, mask=inside, other=float("-inf"))
        part_total = tl.load(partial_ml + at * 2 + 1, mask=inside, other=0.0)
        part_acc = tl.load(
            partial + at[:, :, None] * DIM + d[None, None, :], mask=inside[:, :, None], other=0.0
        )
        highest = tl.maximum(m, tl.max(part_m, axis=0))
        safe = tl.where(there, highest, 0.0)
        keep, factor = tl.exp2(m - safe), tl.exp2(part_m - safe[None, :])
        total = total * keep + tl.sum(part_total * factor, axis=0)
        acc = acc * keep[:, None] + tl.sum(part_acc * factor[:, :, None], axis=0)
        m = highest
    if SINKS:
        total, keep = add_sinks(m, total, sinks, first_head + local, there)
        acc = acc * keep[:, None]
    total = tl.where(there, total, 1.0)
    kind: tl.constexpr = target.dtype.element_ty
    at = target + local[:, None] * out_group + d[None, :]
    tl.store(at, (acc / total[:, None]).to(kind), mask=there[:, None])


@triton.jit
def add_tile(
    q_first, q_second, first, second, values, token, end, kv_len, scale, softcap, window, m, total, acc,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and output of some query heads with a tile of keys, in halves, and values added."""
    scores = tl.dot(q_first, tl.trans(first), input_precision="ieee")
    scores = tl.dot(q_second, tl.trans(second), scores, input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * tanh(scores)
    visible = token < end
    if WINDOW:
        visible = visible & (token >= kv_len - window)
    scores = tl.where(visible[None, :], scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, axis=1))
    p = tl.exp2(scores - highest[:, None])
    keep = tl.exp2(m - highest)
    total = total * keep + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def decode_turned(
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

    Parts as in decode. Compiled without fusing products and sums: see rope.
    """
    let_next_start(OVERLAP)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, kv_len, mine = decode_row(row, counts, cu_q, kv_lens, row_seqs)
    begin, end = split_bounds(kv_len, split, window, SPLITS, WINDOW, BLOCK_N)
    pages = page_table + seq * max_pages
    PLANE: tl.constexpr = KV_HEADS * PAGE * DIM
    newest = kv_len - 1
    # Earlier tokens come from earlier steps: they may be asked for ahead of the turn.
    if OVERLAP:  # noqa: SIM102 (a constant and a value of the device do not mix)
        if mine & (begin < end):
            ahead = token_at(
                kv_pool,
                pages,
                begin + tl.arange(0, BLOCK_N),
                newest,
                layers,
                layer,
                kv_head,
                KV_HEADS,
                DIM,
                PAGE,
            )
            fetch_to_l2(ahead + tl.arange(0, DIM // 64)[None, :] * 64)
            fetch_to_l2(ahead + PLANE + tl.arange(0, DIM // 64)[None, :] * 64)
    wait_for_earlier(OVERLAP)
    if not mine or begin >= end:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    kind: tl.constexpr = q.dtype.element_ty
    row64 = row.to(tl.int64)
    pairs, d, local = tl.arange(0, HALF)[None, :], tl.arange(0, DIM), tl.arange(0, GROUP_BLOCK)
    all_pairs = pairs < HALF
    cos = tl.load(table + row64 * table_row + pairs).to(kind).to(tl.float32)
    sin = tl.load(table + row64 * table_row + HALF + pairs).to(kind).to(tl.float32)
    if (begin <= newest) & (newest < end):
        first, second = turned_heads(
            k + row64 * k_row + kv_head * k_group, k_norm, cos, sin, pairs, pairs + HALF, all_pairs,
            all_pairs,
            eps, weight_offset, DIM, QK_NORM, CAST_FIRST, HAS_OFFSET,
        )  # fmt: skip
        value = tl.load(v + row64 * v_row + kv_head * v_group + d)
        page = tl.load(pages + newest // PAGE).to(tl.int64)
        at = kv_pool + (page * layers + layer) * (2 * PLANE) + (kv_head * PAGE + newest % PAGE) * DIM
        cached: tl.constexpr = kv_pool.dtype.element_ty
        tl.store(at + pairs, first.to(cached))
        tl.store(at + HALF + pairs, second.to(cached))
        tl.store(at + PLANE + d, value.to(cached))
        tl.debug_barrier()  # other threads of this block read them below
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
        keys = token_at(kv_pool, pages, token, newest, layers, layer, kv_head, KV_HEADS, DIM, PAGE)
        first = tl.load(keys + pairs).to(kind)
        second = tl.load(keys + HALF + pairs).to(kind)
        values = tl.load(keys + PLANE + d[None, :]).to(kind)
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
            tl.store(partial + at_split[:, None] * DIM + d[None, :], acc, mask=inside)
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
    target = out + row64 * out_row + heads[:, None] * out_group + d[None, :]
    tl.store(target, (acc / total[:, None]).to(kind), mask=inside)
