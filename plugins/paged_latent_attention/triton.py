"""Kernels of paged_latent_attention: cache write, products by head, attention of rows over latents.

A token's latent and rotated key are one line of RANK + ROTARY elements, cached in two halves. All heads
read the same line, so the heads of one row stand as rows of one tile. Latents beyond a row's position are
never loaded: stale cache may hold NaN.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from tapeout.plugins.paged_attention.triton import join_splits, split_bounds
from tapeout.plugins.triton_aot.overlap import take_turn


@triton.jit
def line_start(pages, token, known, layers, layer, LINE: tl.constexpr, PAGE: tl.constexpr):
    """Where the first halves of cached tokens begin in the pool; page 0 for tokens that are not known."""
    page = tl.load(pages + token // PAGE, mask=known, other=0).to(tl.int64)
    return (page * layers + layer) * (PAGE * LINE) + token % PAGE * (LINE // 2)


@triton.jit
def in_line(element, LINE: tl.constexpr, PAGE: tl.constexpr):
    """How far elements of a line are from where its first half begins."""
    return element // (LINE // 2) * (PAGE * (LINE // 2)) + element % (LINE // 2)


@triton.jit
def write_latents(
    latent, k_rot, counts, positions, row_seqs, page_table, kv_pool, latent_row, k_rot_row, layers, layer,
    max_pages,
    RANK: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row's line into its page. Grid (rows, blocks of a line)."""
    T = take_turn(counts, 0, OVERLAP)
    row = tl.program_id(0)
    if row >= T:
        return
    line: tl.constexpr = RANK + ROTARY
    pages = page_table + tl.load(row_seqs + row) * max_pages
    start = line_start(pages, tl.load(positions + row), True, layers, layer, line, PAGE)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row64 = row.to(tl.int64)
    first = tl.load(latent + row64 * latent_row + element, mask=element < RANK, other=0.0)
    turned = (element >= RANK) & (element < line)
    second = tl.load(k_rot + row64 * k_rot_row + (element - RANK), mask=turned, other=0.0)
    value = tl.where(element < RANK, first, second).to(kv_pool.dtype.element_ty)
    tl.store(kv_pool + start + in_line(element, line, PAGE), value, mask=element < line)


@triton.jit
def product_by_head(
    x, weight, out, counts, x_row, x_group, out_row, out_group,
    N: tl.constexpr, K: tl.constexpr, WEIGHT_N: tl.constexpr, WEIGHT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[row, head] = weight[head] x[row, head] for weights [HEADS, N, K] of the strides WEIGHT_N and
    WEIGHT_K. Grid (row blocks, heads, blocks of N)."""
    T = take_turn(counts, 0, OVERLAP)
    first = tl.program_id(0) * BLOCK_M
    if first >= T:
        return
    head = tl.program_id(1)
    row = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row64 = row.to(tl.int64)
    matrix = weight + head.to(tl.int64) * (N * K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            x + (row64 * x_row + head * x_group)[:, None] + k[None, :],
            mask=(row < T)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            matrix + n[None, :] * WEIGHT_N + k[:, None] * WEIGHT_K,
            mask=(n < N)[None, :] & (k < K)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(
        out + (row64 * out_row + head * out_group)[:, None] + n[None, :],
        total.to(out.dtype.element_ty), mask=(row < T)[:, None] & (n < N)[None, :],
    )  # fmt: skip


@triton.jit
def attend_latents(
    queries, q_rot, mixed, partial, partial_ml, counts, positions, row_seqs, page_table, kv_pool,
    rot_row, rot_group, scale, window, layers, layer, max_pages,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr, PAGE: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """HEADS_BLOCK heads of a row over its tokens, of which a split takes a part. Grid (rows, head blocks,
    splits).

    queries and mixed [rows, HEADS, RANK]: in the latents' space, before and after; they may be the same
    memory. scale holds log2(e). With SPLITS > 1 sums are left in partial [rows, HEADS, SPLITS, RANK] and
    their maximum and sum in partial_ml [rows, HEADS, SPLITS, 2].
    """
    T = take_turn(counts, 0, OVERLAP)
    row, split = tl.program_id(0), tl.program_id(2)
    if row >= T:
        return
    position = tl.load(positions + row)
    begin, end = split_bounds(position + 1, split, window, SPLITS, WINDOW, BLOCK_N)
    if begin >= end:
        return
    line: tl.constexpr = RANK + ROTARY
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    r, p = tl.arange(0, RANK_BLOCK), tl.arange(0, ROTARY_BLOCK)
    of_row = row.to(tl.int64) * HEADS + head
    inside = (head < HEADS)[:, None] & (r < RANK)[None, :]
    kind: tl.constexpr = q_rot.dtype.element_ty
    q = tl.load(queries + of_row[:, None] * RANK + r[None, :], mask=inside, other=0.0)
    q_turned = tl.load(
        q_rot + row.to(tl.int64) * rot_row + head[:, None] * rot_group + p[None, :],
        mask=(head < HEADS)[:, None] & (p < ROTARY)[None, :], other=0.0,
    )  # fmt: skip
    m = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS_BLOCK,), tl.float32)
    acc = tl.zeros((HEADS_BLOCK, RANK_BLOCK), tl.float32)
    pages = page_table + tl.load(row_seqs + row) * max_pages
    for start in range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        known = token < end
        at = kv_pool + line_start(pages, token, known, layers, layer, line, PAGE)
        latents = tl.load(
            at[:, None] + in_line(r, line, PAGE)[None, :],
            mask=known[:, None] & (r < RANK)[None, :], other=0.0,
        ).to(kind)  # fmt: skip
        turned = tl.load(
            at[:, None] + in_line(RANK + p, line, PAGE)[None, :],
            mask=known[:, None] & (p < ROTARY)[None, :], other=0.0,
        ).to(kind)  # fmt: skip
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee") * scale
        visible = known
        if WINDOW:
            visible = visible & (token > position - window)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, axis=1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # nothing visible yet
        weight = tl.exp2(scores - safe[:, None])
        keep = tl.exp2(m - safe)
        total = total * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(kind), latents, acc * keep[:, None], input_precision="ieee")
        m = highest
    if SPLITS > 1:
        at_split = of_row * SPLITS + split
        tl.store(partial + at_split[:, None] * RANK + r[None, :], acc, mask=inside)
        tl.store(partial_ml + at_split * 2, m, mask=head < HEADS)
        tl.store(partial_ml + at_split * 2 + 1, total, mask=head < HEADS)
    else:
        tl.store(mixed + of_row[:, None] * RANK + r[None, :], (acc / total[:, None]).to(kind), mask=inside)


@triton.jit
def join_latents(
    mixed, partial, partial_ml, counts, positions, window,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What the splits of one row and head left, together. Grid (rows, heads)."""
    T = take_turn(counts, 0, OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= T:
        return
    join_splits(
        mixed, mixed, partial, partial_ml, row, row, head, tl.load(positions + row) + 1, HEADS * RANK, RANK,
        window, HEADS, RANK, RANK_BLOCK, BLOCK_N, SPLITS, WINDOW, False,
    )  # fmt: skip
