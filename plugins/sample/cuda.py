"""Launches of sampling on a CUDA device; the planner puts them around the model's own.

`fill_launch` stands before the model: token ids of -1 become the ids sampled last, so that a step
can be planned before its ids are known. `sample_launches` stand after it: input 0 is the logits
[R, V]. They read and write step tensors only (see STEP_TENSORS).
"""

from __future__ import annotations

from tapeout.plugins.cpu import TensorType
from tapeout.plugins.cuda import Arg, GridDim, LaunchSpec
from tapeout.plugins.triton_aot.tactic import (
    Argument,
    ceil_div,
    launch,
    pointer,
    power_of_two,
    step,
    workspace,
)

_FILL_BLOCK, _CHUNK, _BLOCK = 256, 4096, 4096


def fill_launch() -> LaunchSpec:
    """One launch over the step's T rows."""
    names = ("token_ids", "counts", "row_seqs", "seq_slots", "last_ids")
    constants = {"BLOCK": _FILL_BLOCK}
    grid = (GridDim(_FILL_BLOCK),)
    return launch("sample.triton:fill_token_ids", [step(n) for n in names], constants, grid, num_warps=4)


def sample_workspace_bytes(logits: TensorType, rows: int) -> int:
    """Scratch of `sample_launches` at `rows` logit rows."""
    return 3 * 4 * _padded(rows, int(logits.shape[1]))


def sample_launches(logits: TensorType, rows: int, valid_vocab_size: int) -> tuple[LaunchSpec, ...]:
    """Two launches over R rows of logits (float32 or bfloat16 [R, V]).

    Args:
        rows: padded R of the bucket.
        valid_vocab_size: larger ids are never chosen.
    """
    vocab = int(logits.shape[1])
    chunks = ceil_div(vocab, _CHUNK)
    size = 4 * _padded(rows, vocab)
    source = pointer("logits", logits.dtype, Arg("input", 0))
    row = Argument("logits_row", "i32", Arg("input_stride", 0, value=0))
    partials = [
        workspace("values"), workspace("indices", "int32", size), workspace("finites", "int32", 2 * size),
    ]  # fmt: skip
    valid = min(valid_vocab_size, vocab)
    scan = launch(
        "sample.triton:partial_max",
        [source, *partials, step("counts"), row],
        {"VOCAB": vocab, "VALID": valid, "BLOCK": _CHUNK, "CHUNKS": chunks},
        (GridDim(1), GridDim(0, chunks)),
        num_warps=8,
    )
    names = (
        "counts", "row_ids", "row_seqs", "positions", "seq_slots", "sample_state", "out_ids", "out_finite",
        "last_ids",
    )  # fmt: skip
    choose = launch(
        "sample.triton:choose",
        [source, *partials, *(step(n) for n in names), row],
        {"VALID": valid, "BLOCK": _BLOCK, "CHUNKS": chunks, "CHUNKS_BLOCK": power_of_two(chunks)},
        (GridDim(1),),
        num_warps=16,
        fp_fusion=False,
    )
    return scan, choose


def _padded(rows: int, vocab: int) -> int:
    """Elements of one array of partial results, a multiple of 4 so that all are 16-byte aligned."""
    return ceil_div(rows * ceil_div(vocab, _CHUNK), 4) * 4
