"""Context attention that reads the step's own keys and values from their rows, not from the cache.

Rows lie in one piece, so that the copy engine brings whole tiles (SM 90 and above); only what
earlier steps left comes through the page table. Compiled with fused products and sums.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import tanh
from tapeout.plugins.paged_attention.triton import add_sinks, all_decode, cached
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def attend_fused(
    q, m, total, acc, keys, values, visible, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend` with the scale folded into the exponent's argument."""
    scores = tl.dot(q, tl.trans(keys))
    if SOFTCAP:
        scores = softcap * tanh(scores * scale)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    factor = 1.0 if SOFTCAP else scale
    highest = tl.maximum(m, tl.max(scores, axis=1) * factor)
    safe = highest
    if MASKED:
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # nothing visible yet
    p = tl.exp2(scores * factor - safe[:, None])
    keep = tl.exp2(m - safe)
    total = total * keep + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
    return highest, total, acc


@triton.jit
def earlier_range(
    queries, m, total, acc, low, high, position, kv_pool, pages, scale, softcap, window, layers, layer,
    kv_head, d, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend over cached tokens [low, high)."""
    kind: tl.constexpr = queries.dtype
    for start in range(low, high, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        at, there = cached(kv_pool, pages, token, high, layers, layer, kv_head, d, KV_HEADS, DIM, PAGE)
        keys = tl.load(at, mask=there, other=0.0).to(kind)
        values = tl.load(at + KV_HEADS * PAGE * DIM, mask=there, other=0.0).to(kind)
        visible = (token < high)[None, :] & (position[:, None] >= 0)
        if WINDOW:
            visible = visible & (token[None, :] > position[:, None] - window)
        m, total, acc = attend_fused(
            queries, m, total, acc, keys, values, visible, scale, softcap, SOFTCAP, MASKED
        )
    return m, total, acc


@triton.jit
def row_range(
    queries, m, total, acc, low, high, row, key_tiles, value_tiles, kv_head, scale, softcap, window,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend over the step's rows [low, high), all of one sequence."""
    for start in range(low, high, BLOCK_N):
        keys = key_tiles.load([start, kv_head, 0]).reshape(BLOCK_N, DIM)
        values = value_tiles.load([start, kv_head, 0]).reshape(BLOCK_N, DIM)
        key_row = start + tl.arange(0, BLOCK_N)
        visible = key_row[None, :] <= row[:, None]
        if WINDOW:
            visible = visible & (key_row[None, :] > row[:, None] - window)
        m, total, acc = attend_fused(
            queries, m, total, acc, keys, values, visible, scale, softcap, SOFTCAP, MASKED
        )
    return m, total, acc


@triton.jit
def packed_context(
    q, k, v, out, sinks, counts, cu_q, kv_lens, row_seqs, page_table, kv_pool,
    q_row, q_group, k_row, k_group, v_row, v_group, out_row, out_group, scale, softcap, window,
    layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`context` without rows that decode. Grid (head blocks, row blocks), the longest rows first."""
    T = take_turn(counts, 0, OVERLAP)
    blocks = tl.cdiv(T, BLOCK_Q)
    index = blocks - 1 - tl.program_id(1)
    if index < 0:
        return
    first = index * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, T)
    first_seq, last_seq = tl.load(row_seqs + first), tl.load(row_seqs + last - 1)
    if all_decode(first, last, first_seq, last_seq, cu_q):
        return
    head_block = tl.program_id(0)
    kv_head = head_block * HEADS_BLOCK // (HEADS // KV_HEADS)
    local, d = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    row = first + local // HEADS_BLOCK
    head = head_block * HEADS_BLOCK + local % HEADS_BLOCK
    real = row < last
    kind: tl.constexpr = q.dtype.element_ty
    row64 = row.to(tl.int64)
    queries = tl.load(
        q + (row64 * q_row + head * q_group)[:, None] + d[None, :], mask=real[:, None], other=0.0
    )
    target = out + (row64 * out_row + head * out_group)[:, None] + d[None, :]
    key_tiles = tl.make_tensor_descriptor(k, [T, KV_HEADS, DIM], [k_row, k_group, 1], [BLOCK_N, 1, DIM])
    value_tiles = tl.make_tensor_descriptor(v, [T, KV_HEADS, DIM], [v_row, v_group, 1], [BLOCK_N, 1, DIM])
    for seq in range(first_seq, last_seq + 1):
        start_row, end_row = tl.load(cu_q + seq), tl.load(cu_q + seq + 1)
        if end_row - start_row > 1:
            earlier = tl.load(kv_lens + seq) - (end_row - start_row)  # tokens of earlier steps
            mine = real & (row >= start_row) & (row < end_row)
            position = row - start_row + earlier
            top = tl.maximum(first, start_row)
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, DIM), tl.float32)
            pages = page_table + seq * max_pages
            low, full = 0, earlier // BLOCK_N * BLOCK_N
            low_row = start_row
            if WINDOW:
                oldest = tl.maximum(top - start_row + earlier - window + 1, 0)
                low = tl.minimum(oldest // BLOCK_N * BLOCK_N, earlier)
                full = low
                low_row += tl.maximum(oldest - earlier, 0) // BLOCK_N * BLOCK_N
            m, total, acc = earlier_range(
                queries, m, total, acc, low, full, position, kv_pool, pages, scale, softcap, window, layers,
                layer, kv_head, d, KV_HEADS, DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, False,
            )  # fmt: skip
            m, total, acc = earlier_range(
                queries, m, total, acc, full, earlier, position, kv_pool, pages, scale, softcap, window,
                layers, layer, kv_head, d, KV_HEADS, DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, True,
            )  # fmt: skip
            middle = low_row
            if not WINDOW:  # up to here every row of the block sees every key
                middle = start_row + (top - start_row + 1) // BLOCK_N * BLOCK_N
            m, total, acc = row_range(
                queries, m, total, acc, low_row, middle, row, key_tiles, value_tiles, kv_head, scale,
                softcap, window, DIM, BLOCK_N, WINDOW, SOFTCAP, False,
            )  # fmt: skip
            m, total, acc = row_range(
                queries, m, total, acc, middle, tl.minimum(last, end_row), row, key_tiles,
                value_tiles, kv_head, scale, softcap, window, DIM, BLOCK_N, WINDOW, SOFTCAP, True,
            )  # fmt: skip
            if SINKS:
                total, keep = add_sinks(m, total, sinks, head, mine)
                acc = acc * keep[:, None]
            tl.store(target, (acc / total[:, None]).to(kind), mask=mine[:, None])
