"""Run the kernel a step begins with in Triton's interpreter, on what the host writes.

Prints one JSON object a tensor: {"case", "row", "got", "expected"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "executors"))

import interpret_cuda
import numpy as np
import torch
from fake_cuda import FakeCuda

from tapeout.plugins.sample.cuda import receive_launch
from tapeout.plugins.triton_aot.operands import Operands
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.executors.cuda import driver
from tapeout.runtime.executors.cuda.step_buffers import StepBuffers
from tapeout.runtime.step import FROM_SLOT, StepInputs

NAMES = ("cu_q", "kv_lens", "row_ids", "seq_slots", "token_ids", "positions", "row_seqs")
STALE = -7


def random_step(rng: np.random.Generator, limits: Limits, sequences: int, *, decode: bool) -> StepInputs:
    """Rows of one token, or of more as long as there is room; some ids are known to the device alone."""
    lengths = np.ones(sequences, np.int32)
    for i in range(0 if decode else sequences):
        lengths[i] += rng.integers(0, 1 + (limits.max_num_tokens - lengths.sum()) // 2)
    cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    kv_lens = rng.integers(lengths, limits.max_seq_len + 1).astype(np.int32)
    ids = rng.integers(0, 1000, cu_q[-1]).astype(np.int32)
    ids[rng.random(len(ids)) < 0.5] = FROM_SLOT
    width = -(-int(kv_lens.max()) // limits.tokens_per_page)
    slots = rng.permutation(limits.max_batch_size)[:sequences].astype(np.int32)
    rows = np.sort(rng.permutation(sequences)[: 1 + sequences // 2])
    pages = rng.integers(0, 99, (sequences, width)).astype(np.int32)
    positions = rng.integers(0, 99, len(ids)).astype(np.int32)
    row_ids = (cu_q[rows + 1] - 1).astype(np.int32)
    return StepInputs(ids, positions, cu_q, kv_lens, pages, slots, row_ids, slots[rows])


def check(limits: Limits, num_steps: int) -> None:
    steps = StepBuffers(limits)
    rng = np.random.default_rng(limits.max_batch_size)

    def view(name: str, size: int) -> torch.Tensor:
        values = (ctypes.c_int32 * size).from_address(steps.address(name))
        return torch.from_numpy(np.ctypeslib.as_array(values))

    batch, words = limits.max_batch_size, steps.inbox_words
    last_ids = torch.from_numpy(rng.integers(2000, 3000, batch).astype(np.int32))
    sizes = (batch + 1, batch, batch, batch, *(limits.max_num_tokens,) * 3)
    tensors = {name: view(name, size) for name, size in zip(NAMES, sizes, strict=True)}
    tensors |= {"counts": view("counts", words), "page_table": view("page_table", batch * steps.max_pages)}
    tensors |= {"turns": view("turns", 2), "inbox": view("inbox", 4 * words), "last_ids": last_ids}
    scalars = {"inbox_words": words, "max_pages": steps.max_pages}
    bound = Operands((), (), (), tensors, torch.zeros(0), scalars=scalars)
    spec = receive_launch(
        limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len, limits.tokens_per_page
    )
    for number in range(num_steps):
        sequences = (batch, 1, max(1, batch // 2), batch)[number % 4]
        inputs = random_step(rng, limits, sequences, decode=number % 3 == 0)
        tensors["counts"][:] = STALE
        steps.write(inputs)
        steps.next_turn()
        rows, lengths = len(inputs.token_ids), np.diff(inputs.cu_q)
        interpret_cuda.launch(spec, bound, min(limits.max_num_tokens, 1 << (rows - 1).bit_length()))
        row_seqs = np.repeat(np.arange(sequences), lengths)
        sampled = last_ids.numpy()[inputs.slots[row_seqs]]
        wanted = {
            "cu_q": inputs.cu_q, "kv_lens": inputs.kv_lens, "row_ids": inputs.row_ids,
            "seq_slots": inputs.slots,
            "token_ids": np.where(inputs.token_ids == FROM_SLOT, sampled, inputs.token_ids),
            "positions": inputs.positions, "row_seqs": row_seqs,
        }  # fmt: skip
        for row, name in enumerate(NAMES):
            expected = wanted[name].tolist()
            if len(expected) < len(tensors[name]):  # what is behind stays as it was
                expected.append(STALE)
            got = tensors[name].tolist()[: len(expected)]
            tell(f"{batch} {number} {name}", row, got, expected)
        table = tensors["page_table"].reshape(batch, steps.max_pages)
        used = table[:sequences, : inputs.page_table.shape[1]]
        tell(f"{batch} {number} pages", 0, used.tolist(), inputs.page_table.tolist())
        counts = [rows, sequences, int(lengths.max()), int(inputs.kv_lens.max()), len(inputs.row_ids)]
        tell(f"{batch} {number} counts", 0, tensors["counts"][:5].tolist(), counts)
        beyond = set(table[sequences:].flatten().tolist())
        tell(f"{batch} {number} beyond", 0, beyond <= {STALE}, True)
        tell(f"{batch} {number} turns", 0, tensors["turns"].tolist(), [number + 1, 0])
    steps.close()


def tell(case: str, row: int, got: object, expected: object) -> None:
    sys.stdout.write(json.dumps({"case": case, "row": row, "got": got, "expected": expected}) + "\n")


if __name__ == "__main__":
    driver.cu = FakeCuda()
    check(Limits(max_batch_size=3, max_num_tokens=4, max_seq_len=64, tokens_per_page=16), 5)
    check(Limits(max_batch_size=32, max_num_tokens=96, max_seq_len=4096, tokens_per_page=32), 9)
