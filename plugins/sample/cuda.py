"""Launches of sampling on a CUDA device; the planner puts them around the model's own.

`receive_launch` stands before the model: it brings the step's tensors, with the ids sampled last where the
host did not know them when it planned the step. `sample_launches` stand after it: input 0 is the logits
[R, V]. They read and write step tensors only (see STEP_TENSORS).
"""

from __future__ import annotations

from tapeout.plugins.cpu import TensorType
from tapeout.plugins.cuda import TURNS, Arg, GridDim, LaunchSpec
from tapeout.plugins.sample.logprob_words import DEVICE_LOGPROBS, LOGPROB_WORDS
from tapeout.plugins.sample.state import bits_row, counts_row
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    ceil_div,
    launch,
    pointer,
    power_of_two,
    step,
    workspace,
)

_CHUNK, _BLOCK = 4096, 4096
_INBOX_ROWS, _INBOX_COLUMNS = 32, 64
_FULL_BLOCK = 2048  # smaller blocks in place of spilled registers
_SLOT_OF_ROW = ("row_ids", "row_seqs", "seq_slots")
_SLOT_STATE = ("sample_state", "sample_bits", "output_counts")


def receive_launch(
    max_num_tokens: int, max_batch_size: int, max_seq_len: int, tokens_per_page: int
) -> LaunchSpec:
    """One launch over the step's T rows, none of which is beyond the engine's limits."""
    names = (
        "turns", "inbox", "counts", "cu_q", "kv_lens", "row_ids", "seq_slots", "token_ids", "positions",
        "row_seqs", "page_table", "last_ids",
    )  # fmt: skip
    constants = {
        "TOKENS": max_num_tokens, "BATCH": max_batch_size, "PAGE": tokens_per_page, "ROWS": _INBOX_ROWS,
        "COLUMNS": _INBOX_COLUMNS, "TURNS": TURNS,
    }  # fmt: skip
    max_pages = ceil_div(max_seq_len, tokens_per_page)
    return launch(
        "sample.triton_inbox:receive",
        [*_steps(*names), _scalar("inbox_words"), _scalar("max_pages")],
        constants,
        (GridDim(_INBOX_ROWS), GridDim(0, 1 + ceil_div(max_pages, _INBOX_COLUMNS))),
        num_warps=2,
    )


def sample_workspace_bytes(logits: TensorType, rows: int, *, full: bool = False) -> int:
    """Scratch of `sample_launches` at `rows` logit rows."""
    return _Scratch(rows, int(logits.shape[1])).size_bytes(full)


def sample_launches(
    logits: TensorType, rows: int, valid_vocab_size: int, *, full: bool = False
) -> tuple[LaunchSpec, ...]:
    """Launches over R rows of logits (float32 or bfloat16 [R, V]): two, or four that do everything.

    Args:
        rows: padded R of the bucket.
        valid_vocab_size: larger ids are never chosen.
        full: with penalties, min_tokens and logprobs, for steps in which a row wants one of them.
    """
    vocab = int(logits.shape[1])
    chunks, scratch = ceil_div(vocab, _CHUNK), _Scratch(rows, vocab)
    source = pointer("logits", logits.dtype, Arg("input", 0))
    row = Argument("logits_row", "i32", Arg("input_stride", 0, value=0))
    valid = min(valid_vocab_size, vocab)
    slots = {"COUNTS_ROW": counts_row(vocab), "BITS_ROW": bits_row(vocab), "FULL": full}
    scan = launch(
        "sample.triton:partial_max",
        [source, *scratch.maxima(), *_steps("counts", *_SLOT_OF_ROW, *_SLOT_STATE), row],
        {"VOCAB": vocab, "VALID": valid, "BLOCK": _CHUNK, "CHUNKS": chunks, **slots},
        (GridDim(1), GridDim(0, chunks)),
        num_warps=16 if full else 8,
        fp_fusion=False,
    )
    names = (
        "counts", "row_ids", "row_seqs", "positions", "seq_slots", "sample_state", "out_ids", "last_ids",
        "sample_bits", "output_counts", "turns", "outbox",
    )  # fmt: skip
    choose = launch(
        "sample.triton:choose",
        [source, *scratch.maxima(), *_steps(*names), _scalar("outbox_words"), row],
        {
            "VALID": valid, "BLOCK": _FULL_BLOCK if full else _BLOCK, "CHUNKS": chunks,
            "CHUNKS_BLOCK": power_of_two(chunks), "TURNS": TURNS, **slots,
        },
        (GridDim(1),),
        num_warps=16,
        fp_fusion=False,
    )  # fmt: skip
    return (scan, choose, *_logprob_launches(source, row, vocab, scratch)) if full else (scan, choose)


def _logprob_launches(
    source: Argument, row: Argument, vocab: int, scratch: _Scratch
) -> tuple[LaunchSpec, LaunchSpec]:
    chunks = ceil_div(vocab, _CHUNK)
    names = ("counts", *_SLOT_OF_ROW, "sample_state", "out_ids")
    partial = launch(
        "sample.triton_logprobs:partial_logprobs",
        [source, *scratch.logprobs(), *_steps(*names), row],
        {"VOCAB": vocab, "BLOCK": _CHUNK, "CHUNKS": chunks, "TOP": DEVICE_LOGPROBS},
        (GridDim(1), GridDim(0, chunks)),
        num_warps=8,
    )
    constants = {
        "CHUNKS": chunks, "CHUNKS_BLOCK": power_of_two(chunks), "TOP": DEVICE_LOGPROBS,
        "KEYS_BLOCK": power_of_two(chunks * DEVICE_LOGPROBS), "WORDS": LOGPROB_WORDS,
    }  # fmt: skip
    merge = launch(
        "sample.triton_logprobs:merge_logprobs",
        [source, *scratch.logprobs(), *_steps(*names, "out_logprobs"), row],
        constants,
        (GridDim(1),),
        num_warps=4,
    )
    return partial, merge


def _steps(*names: str) -> list[Argument]:
    return [step(name) for name in names]


def _scalar(kind: str) -> Argument:
    return Argument(kind, "i32", Arg(kind))


class _Scratch:
    """Where partial results of `rows` rows lie in the workspace, one element a chunk."""

    def __init__(self, rows: int, vocab: int) -> None:
        # A multiple of 4 elements, so that all arrays are 16-byte aligned.
        self._count = ceil_div(rows * ceil_div(vocab, _CHUNK), 4) * 4

    def size_bytes(self, full: bool) -> int:
        return self._count * (12 + 16 + 8 * DEVICE_LOGPROBS if full else 12)

    def maxima(self) -> list[Argument]:
        """Of each chunk: largest score, its id, whether all are finite."""
        n = self._count
        return [
            workspace("values"), workspace("indices", "int32", 4 * n), workspace("finites", "int32", 8 * n),
        ]  # fmt: skip

    def logprobs(self) -> list[Argument]:
        """Of each chunk: largest logit, sum of exponentials, ids before the sampled one, top keys."""
        n = self._count
        return [
            workspace("highs", "float32", 12 * n),
            Argument("totals", "*fp64", Arg("workspace", value=20 * n)),
            workspace("ranks", "int32", 16 * n),
            Argument("keys", "*i64", Arg("workspace", value=28 * n)),
        ]
