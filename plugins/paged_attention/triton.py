"""Kernels of paged_attention: cache write, split-KV decode, combination of splits, context.

Scores are kept in units of log2, so that softmax uses exp2. The query heads of a kv head stand
as rows of one tile (head h reads kv head h // GROUP), which reads keys and values once for all.
Keys and values beyond a sequence's length are never loaded: stale cache may hold NaN.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.activation.triton import tanh
from tapeout.plugins.triton_aot.overlap import let_next_start, take_turn, wait_for_earlier

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    k, v, counts, positions, row_seqs, page_table, kv_pool, k_row, k_group, v_row, v_group,
    layers, layer, max_pages,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Keys and values of one row into its page. Grid (rows, blocks of kv_heads * dim)."""
    T = take_turn(counts, 0, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    position = tl.load(positions + row)
    page = tl.load(page_table + tl.load(row_seqs + row) * max_pages + position // PAGE)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < KV_HEADS * DIM
    head, d = element // DIM, element % DIM
    kind: tl.constexpr = kv_pool.dtype.element_ty
    row64 = row.to(tl.int64)
    keys = tl.load(k + row64 * k_row + head * k_group + d, mask=inside)
    values = tl.load(v + row64 * v_row + head * v_group + d, mask=inside)
    plane: tl.constexpr = KV_HEADS * PAGE * DIM
    target = kv_pool + (page.to(tl.int64) * layers + layer) * (2 * plane)
    target += (head * PAGE + position % PAGE) * DIM + d
    tl.store(target, keys.to(kind), mask=inside)
    tl.store(target + plane, values.to(kind), mask=inside)


@triton.jit
def cached(
    kv_pool, pages, token, kv_len, layers, layer, head, d,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Pointers [tokens, dim] to cached keys, and the mask of those that exist."""
    page = tl.load(pages + token // PAGE, mask=token < kv_len, other=0).to(tl.int64)
    at = (page * layers + layer) * (2 * KV_HEADS * PAGE * DIM) + (head * PAGE + token % PAGE) * DIM
    return kv_pool + at[:, None] + d[None, :], (token < kv_len)[:, None] & (d < DIM)[None, :]


@triton.jit
def attend(
    q, m, total, acc, keys, values, visible, scale, softcap, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    bias=0.0, ALIBI: tl.constexpr = False,
):  # fmt: skip
    """One step of the online softmax: q [M, D], keys and values [N, D], visible [M, N] where MASKED.

    scale holds log2(e); with SOFTCAP, scale is over softcap and softcap holds log2(e). With ALIBI, bias
    [M, N] is added to the scores; it holds log2(e), too.
    """
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * tanh(scores)
    if ALIBI:
        scores += bias
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, axis=1))
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # nothing visible yet
    p = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(m - safe)
    total = total * keep + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit
def alibi_slopes(slopes, heads, inside, ALIBI: tl.constexpr):
    """Slopes of the heads in units of log2; what stands for them where there are none."""
    found = 0.0
    if ALIBI:
        found = tl.load(slopes + heads, mask=inside, other=0.0) * LOG2_E
    return found


@triton.jit
def alibi_bias(slope, token, position, ALIBI: tl.constexpr):
    """What is added to scores: slope [M] times how far tokens [N] stand behind positions ([M] or one)."""
    bias = 0.0
    if ALIBI:
        bias = slope[:, None] * (token[None, :] - position).to(tl.float32)
    return bias


@triton.jit
def add_sinks(m, total, sinks, heads, inside):
    """The softmax's maximum and sum with one more logit per head; also the factor on acc."""
    sink = tl.load(sinks + heads, mask=inside, other=float("-inf")).to(tl.float32) * LOG2_E
    highest = tl.maximum(m, sink)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    keep = tl.exp2(m - safe)
    return total * keep + tl.exp2(sink - safe), keep


@triton.jit
def split_bounds(kv_len, split, window, SPLITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of the tokens a split of a decode row reads; begin >= end: none.

    Bounds depend on the row's length alone, never on the batch.
    """
    low = 0
    if WINDOW:
        low = tl.maximum(kv_len - window, 0) // BLOCK_N * BLOCK_N
    chunk = tl.cdiv(tl.cdiv(kv_len - low, SPLITS), BLOCK_N) * BLOCK_N
    begin = low + split * chunk
    return begin, tl.minimum(begin + chunk, kv_len)


@triton.jit
def decode_row(row, counts, cu_q, kv_lens, row_seqs):
    """Sequence and cache length of a row, and whether it is the only one of its sequence."""
    real = row < tl.load(counts)
    seq = tl.load(row_seqs + row, mask=real, other=0)
    alone = tl.load(cu_q + seq + 1) - tl.load(cu_q + seq) == 1
    return seq, tl.load(kv_lens + seq), real & alone


@triton.jit
def decode_range(
    q, out, slopes, sinks, partial, partial_ml, row, seq, slot, kv_head, split, begin, end, kv_len,
    page_table, kv_pool, q_row, q_group, out_row, out_group, scale, softcap, window, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """One row's query heads of a kv head over the tokens [begin, end).

    With SPLITS > 1 what comes out are unnormalised sums partial [slots, HEADS, SPLITS, DIM] and their
    maximum and sum partial_ml [slots, HEADS, SPLITS, 2].
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    local, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    heads = kv_head * GROUP + local
    row64 = row.to(tl.int64)
    inside = (local < GROUP)[:, None] & (d < DIM)[None, :]
    kind: tl.constexpr = q.dtype.element_ty
    queries = tl.load(q + row64 * q_row + heads[:, None] * q_group + d[None, :], mask=inside, other=0.0)
    m = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    acc = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    pages = page_table + seq * max_pages
    slope = alibi_slopes(slopes, heads, local < GROUP, ALIBI)
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        at, there = cached(kv_pool, pages, token, kv_len, layers, layer, kv_head, d, KV_HEADS, DIM, PAGE)
        keys = tl.load(at, mask=there, other=0.0).to(kind)
        values = tl.load(at + KV_HEADS * PAGE * DIM, mask=there, other=0.0).to(kind)
        visible = token < end
        if WINDOW:
            visible = visible & (token >= kv_len - window)
        m, total, acc = attend(
            queries, m, total, acc, keys, values, visible[None, :], scale, softcap, SOFTCAP, True,
            alibi_bias(slope, token, kv_len - 1, ALIBI), ALIBI,
        )  # fmt: skip
    if SPLITS > 1:
        at_split = (slot.to(tl.int64) * HEADS + heads) * SPLITS + split
        tl.store(partial + at_split[:, None] * DIM + d[None, :], acc, mask=inside)
        tl.store(partial_ml + at_split * 2, m, mask=local < GROUP)
        tl.store(partial_ml + at_split * 2 + 1, total, mask=local < GROUP)
    else:
        if SINKS:
            total, keep = add_sinks(m, total, sinks, heads, local < GROUP)
            acc = acc * keep[:, None]
        target = out + row64 * out_row + heads[:, None] * out_group + d[None, :]
        tl.store(target, (acc / total[:, None]).to(kind), mask=inside)


@triton.jit
def decode(
    q, out, slopes, sinks, partial, partial_ml, counts, cu_q, kv_lens, row_seqs, page_table, kv_pool,
    q_row, q_group, out_row, out_group, scale, softcap, window, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of sequences with one row; others are left to `context`. Grid (rows, kv heads, splits)."""
    let_next_start(OVERLAP)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, kv_len, mine = decode_row(row, counts, cu_q, kv_lens, row_seqs)
    wait_for_earlier(OVERLAP)
    if not mine:
        return
    begin, end = split_bounds(kv_len, split, window, SPLITS, WINDOW, BLOCK_N)
    if begin >= end:
        return
    decode_range(
        q, out, slopes, sinks, partial, partial_ml, row, seq, row, kv_head, split, begin, end, kv_len,
        page_table, kv_pool, q_row, q_group, out_row, out_group, scale, softcap, window, layers, layer,
        max_pages, HEADS, KV_HEADS, DIM, DIM_BLOCK, PAGE, GROUP_BLOCK, BLOCK_N, SPLITS, WINDOW, SOFTCAP,
        SINKS, ALIBI,
    )  # fmt: skip


@triton.jit
def decode_sequences(
    q, out, slopes, sinks, partial, partial_ml, counts, cu_q, kv_lens, page_table, kv_pool,
    q_row, q_group, out_row, out_group, scale, softcap, window, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """`decode` for steps that mostly have longer rows. Grid (few, kv heads, splits).

    A step of at most `few` sequences splits each over its cache; one of more shares whole
    sequences out among the blocks.
    """
    let_next_start(OVERLAP)
    first, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    few = tl.num_programs(0)
    count = tl.load(counts + 1)
    wait_for_earlier(OVERLAP)
    if SPLITS > 1 and count <= few:
        if first < count:
            row = tl.load(cu_q + first)
            kv_len = tl.load(kv_lens + first)
            begin, end = split_bounds(kv_len, split, window, SPLITS, WINDOW, BLOCK_N)
            if (tl.load(cu_q + first + 1) - row == 1) & (begin < end):
                decode_range(
                    q, out, slopes, sinks, partial, partial_ml, row, first, first, kv_head, split, begin, end,
                    kv_len, page_table, kv_pool, q_row, q_group, out_row, out_group, scale, softcap, window,
                    layers, layer, max_pages, HEADS, KV_HEADS, DIM, DIM_BLOCK, PAGE, GROUP_BLOCK, BLOCK_N,
                    SPLITS, WINDOW, SOFTCAP, SINKS, ALIBI,
                )  # fmt: skip
    else:
        for seq in range(first * SPLITS + split, count, few * SPLITS):
            row = tl.load(cu_q + seq)
            if tl.load(cu_q + seq + 1) - row == 1:
                kv_len = tl.load(kv_lens + seq)
                begin, end = split_bounds(kv_len, 0, window, 1, WINDOW, BLOCK_N)
                decode_range(
                    q, out, slopes, sinks, partial, partial_ml, row, seq, seq, kv_head, 0, begin, end, kv_len,
                    page_table, kv_pool, q_row, q_group, out_row, out_group, scale, softcap, window, layers,
                    layer, max_pages, HEADS, KV_HEADS, DIM, DIM_BLOCK, PAGE, GROUP_BLOCK, BLOCK_N, 1,
                    WINDOW, SOFTCAP, SINKS, ALIBI,
                )  # fmt: skip


@triton.jit
def join_splits(
    out, sinks, partial, partial_ml, row, slot, head, kv_len, out_row, out_group, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One row and head of what `decode_range` left."""
    split, d = tl.arange(0, SPLITS), tl.arange(0, DIM_BLOCK)
    begin, end = split_bounds(kv_len, split, window, SPLITS, WINDOW, BLOCK_N)
    used = begin < end
    at = (slot.to(tl.int64) * HEADS + head) * SPLITS + split
    m = tl.load(partial_ml + at * 2, mask=used, other=float("-inf"))
    split_sum = tl.load(partial_ml + at * 2 + 1, mask=used, other=0.0)
    sums = tl.load(
        partial + at[:, None] * DIM + d[None, :], mask=used[:, None] & (d < DIM)[None, :], other=0.0
    )
    highest = tl.max(m, axis=0)
    weight = tl.exp2(m - highest)
    total = tl.sum(split_sum * weight, axis=0)
    acc = tl.sum(sums * weight[:, None], axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(highest, sink)
        keep = tl.exp2(highest - top)
        total, acc = total * keep + tl.exp2(sink - top), acc * keep
    target = out + row.to(tl.int64) * out_row + head * out_group + d
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def combine(
    out, sinks, partial, partial_ml, counts, cu_q, kv_lens, row_seqs, out_row, out_group, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row and head. Grid (rows, heads)."""
    let_next_start(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    _, kv_len, mine = decode_row(row, counts, cu_q, kv_lens, row_seqs)
    wait_for_earlier(OVERLAP)
    if not mine:
        return
    join_splits(
        out, sinks, partial, partial_ml, row, row, head, kv_len, out_row, out_group, window,
        HEADS, DIM, DIM_BLOCK, BLOCK_N, SPLITS, WINDOW, SINKS,
    )  # fmt: skip


@triton.jit
def combine_sequences(
    out, sinks, partial, partial_ml, counts, cu_q, kv_lens, out_row, out_group, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`combine` behind `decode_sequences`. Grid (few, heads)."""
    count = take_turn(counts, 1, OVERLAP)
    seq, head = tl.program_id(0), tl.program_id(1)
    if (count > tl.num_programs(0)) | (seq >= count):
        return
    row = tl.load(cu_q + seq)
    if tl.load(cu_q + seq + 1) - row != 1:
        return
    join_splits(
        out, sinks, partial, partial_ml, row, seq, head, tl.load(kv_lens + seq), out_row, out_group, window,
        HEADS, DIM, DIM_BLOCK, BLOCK_N, SPLITS, WINDOW, SINKS,
    )  # fmt: skip


@triton.jit
def all_decode(first, last, first_seq, last_seq, cu_q):
    """Whether every sequence with rows in [first, last) has one row."""
    apart = last_seq - first_seq + 1 == last - first
    return apart & (tl.load(cu_q + first_seq) == first) & (tl.load(cu_q + last_seq + 1) == last)


@triton.jit
def context_range(
    queries, m, total, acc, low, high, position, slope, kv_pool, pages, kv_len, scale, softcap, window,
    layers, layer, kv_head, d, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """Attend over the blocks of tokens in [low, high)."""
    kind: tl.constexpr = queries.dtype
    for start in range(low, high, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        at, there = cached(kv_pool, pages, token, kv_len, layers, layer, kv_head, d, KV_HEADS, DIM, PAGE)
        keys = tl.load(at, mask=there, other=0.0).to(kind)
        values = tl.load(at + KV_HEADS * PAGE * DIM, mask=there, other=0.0).to(kind)
        visible = token[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (token[None, :] > position[:, None] - window)
        m, total, acc = attend(
            queries, m, total, acc, keys, values, visible, scale, softcap, SOFTCAP, MASKED,
            alibi_bias(slope, token, position[:, None], ALIBI), ALIBI,
        )  # fmt: skip
    return m, total, acc


@triton.jit
def context(
    q, out, slopes, sinks, counts, cu_q, kv_lens, row_seqs, page_table, kv_pool,
    q_row, q_group, out_row, out_group, scale, softcap, window, layers, layer, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, SKIP_DECODE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q packed rows by HEADS_BLOCK heads of one kv head a block. Grid (row blocks, head blocks).

    A block whose rows belong to several sequences takes them one after the other; with
    SKIP_DECODE those of one row are left to `decode`. For a row the blocks of keys and their
    order depend on its position alone; compiled without fusing products and sums, a block gives
    the same bits with and without a mask.
    """
    T = take_turn(counts, 0, OVERLAP)
    first = tl.program_id(0) * BLOCK_Q
    if first >= T:
        return
    last = tl.minimum(first + BLOCK_Q, T)
    first_seq, last_seq = tl.load(row_seqs + first), tl.load(row_seqs + last - 1)
    if SKIP_DECODE and all_decode(first, last, first_seq, last_seq, cu_q):
        return
    head_block = tl.program_id(1)
    kv_head = head_block * HEADS_BLOCK // (HEADS // KV_HEADS)
    local, d = tl.arange(0, BLOCK_M), tl.arange(0, DIM_BLOCK)
    row = first + local // HEADS_BLOCK
    head = head_block * HEADS_BLOCK + local % HEADS_BLOCK
    real = row < last
    kind: tl.constexpr = q.dtype.element_ty
    row64 = row.to(tl.int64)
    queries = tl.load(
        q + (row64 * q_row + head * q_group)[:, None] + d[None, :],
        mask=real[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    target = out + (row64 * out_row + head * out_group)[:, None] + d[None, :]
    slope = alibi_slopes(slopes, head, real, ALIBI)
    for seq in range(first_seq, last_seq + 1):
        start_row, end_row = tl.load(cu_q + seq), tl.load(cu_q + seq + 1)
        if not SKIP_DECODE or end_row - start_row > 1:
            kv_len = tl.load(kv_lens + seq)
            shift = kv_len - end_row  # a row's position is row + shift
            mine = real & (row >= start_row) & (row < end_row)
            position = row + shift
            high = tl.minimum(last, end_row) + shift
            low = 0
            if WINDOW:
                low = tl.maximum(tl.maximum(first, start_row) + shift - window + 1, 0) // BLOCK_N * BLOCK_N
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, DIM_BLOCK), tl.float32)
            pages = page_table + seq * max_pages
            middle = low
            if not WINDOW:  # up to here every row of the block sees every token
                middle = tl.maximum(first, start_row) + shift + 1
                middle = middle // BLOCK_N * BLOCK_N
            m, total, acc = context_range(
                queries, m, total, acc, low, middle, position, slope, kv_pool, pages, kv_len, scale, softcap,
                window, layers, layer, kv_head, d, KV_HEADS, DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, False,
                ALIBI,
            )  # fmt: skip
            m, total, acc = context_range(
                queries, m, total, acc, middle, high, position, slope, kv_pool, pages, kv_len, scale, softcap,
                window, layers, layer, kv_head, d, KV_HEADS, DIM, PAGE, BLOCK_N, WINDOW, SOFTCAP, True,
                ALIBI,
            )  # fmt: skip
            if SINKS:
                total, keep = add_sinks(m, total, sinks, head, mine)
                acc = acc * keep[:, None]
            tl.store(target, (acc / total[:, None]).to(kind), mask=mine[:, None] & (d < DIM)[None, :])
