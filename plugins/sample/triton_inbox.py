"""The kernel a step begins with: what the host wrote comes to the device.

It reads the host's memory itself, so that a step is one graph launch and no copy: a copy is another engine's
work, and changing over and back costs more than these few kilobytes. What the host wrote before the launch is
seen by plain loads; volatile ones are not joined and took 2.6 us a row (H200).
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def in_box(box, counts, tensor):
    """Where a step tensor lies in the box: as far from its start as from `counts` on the device."""
    return box + (tensor.to(tl.int64) - counts.to(tl.int64)) // 4


@triton.jit
def move(box, counts, tensor, at, capacity, count):
    """Elements of a step tensor below `count` come to the device. All of the block's are asked for, so that
    nothing waits for the count first."""
    inside = at < capacity
    values = tl.load(in_box(box, counts, tensor) + at, mask=inside, other=0)
    tl.store(tensor + at, values, mask=inside & (at < count))


@triton.jit
def receive(
    turns, inbox, counts, cu_q, kv_lens, row_ids, seq_slots, token_ids, positions, row_seqs, page_table,
    last_ids, inbox_words, max_pages,
    TOKENS: tl.constexpr, BATCH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """The step's tensors, from the inbox of its turn. A token id -1 - s becomes the one slot s sampled last.

    Grid (row blocks, 1 + column blocks of the page table). The turn is over when every block has read it.
    """
    turn = tl.load(turns)
    box = inbox + (turn & (TURNS - 1)).to(tl.int64) * inbox_words
    row, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    T, B = tl.load(box), tl.load(box + 1)
    longest, R = tl.load(box + 3), tl.load(box + 4)
    if part == 0:
        move(box, counts, cu_q, row, BATCH + 1, B + 1)
        move(box, counts, kv_lens, row, BATCH, B)
        move(box, counts, seq_slots, row, BATCH, B)
        move(box, counts, row_ids, row, BATCH, R)
        move(box, counts, positions, row, TOKENS, T)
        move(box, counts, row_seqs, row, TOKENS, T)
        ids = tl.load(in_box(box, counts, token_ids) + row, mask=row < TOKENS, other=0)
        # Beyond the step's rows the inbox holds anything.
        sampled = tl.load(last_ids - 1 - ids, mask=(ids < 0) & (row < T), other=0)
        tl.store(token_ids + row, tl.where(ids < 0, sampled, ids), mask=row < T)
        if tl.program_id(0) == 0:
            word = tl.arange(0, 8)
            tl.store(counts + word, tl.load(box + word, mask=word < 5, other=0), mask=word < 5)
            # One more end than sequences: where each has one row, no block's rows reach the last.
            last = tl.zeros((1,), tl.int32) + tl.num_programs(0) * ROWS
            move(box, counts, cu_q, last, BATCH + 1, B + 1)
    else:
        first = (part - 1) * COLUMNS
        if (first == 0) | (first * PAGE < longest):
            column = first + tl.arange(0, COLUMNS)
            at = row[:, None] * max_pages + column[None, :]
            inside = (row < BATCH)[:, None] & (column < max_pages)[None, :]
            pages = tl.load(in_box(box, counts, page_table) + at, mask=inside, other=0)
            tl.store(page_table + at, pages, mask=inside & (row < B)[:, None])
    tl.debug_barrier()  # all threads of the block have read the turn
    blocks = tl.num_programs(0) * tl.num_programs(1)
    if tl.atomic_add(turns + 1, 1) == blocks - 1:
        tl.store(turns + 1, 0)
        tl.store(turns, turn + 1)
