"""Run the sampling kernels in Triton's interpreter: `python interpret_sample.py`.

Prints one JSON object a row: {"case", "row", "got", "expected"}; `expected` is the numpy sampler's id.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import interpret_cuda
import numpy as np
import torch

from tapeout.plugins.cpu import TensorType
from tapeout.plugins.sample.cuda import fill_launch, sample_launches, sample_workspace_bytes
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.sampler import Sampler
from tapeout.plugins.sample.state import state_words
from tapeout.plugins.triton_aot.operands import Operands

VOCAB, VALID, SLOTS = 5008, 4999, 8  # two chunks, the second mostly absent
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2**63 + 5, top_k=5),
    SamplingParams(temperature=1.3, seed=3, top_p=0.6),
    SamplingParams(temperature=2.0, seed=4, min_p=0.2),
    SamplingParams(temperature=0.9, seed=5, top_k=40, top_p=0.8, min_p=0.01),
)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(PARAMS)
    wide = torch.randn((rows + 2, VOCAB + 16), generator=generator) * 3
    wide[:, VALID:] += 100  # padding of the vocabulary must never win
    wide[0, 17] = wide[0, 4000] = 50  # a tie across chunks: the lowest id
    wide[2, :40] = 9.0  # more ties at the border of top-k than k
    wide[rows - 1, 11] = torch.nan if seed % 2 else 1.0
    logits = wide.to(dtype)[:, :VOCAB]
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(torch.int32)
    seq_of_row = torch.arange(rows, dtype=torch.int32)
    state = torch.full((SLOTS, 8), 0x7F7F7F7F, dtype=torch.int32)
    sampler = Sampler(SLOTS, VOCAB, VALID, ())
    for slot, params in zip(slots.tolist(), PARAMS, strict=True):
        state[slot] = torch.from_numpy(state_words(params))
        sampler.admit(slot, params, np.zeros(0, dtype=np.int64))
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator, dtype=torch.int32)
    step = {
        "counts": ints([rows, rows, 1, 1, rows]), "row_ids": torch.arange(rows, dtype=torch.int32),
        "row_seqs": seq_of_row, "positions": positions, "seq_slots": slots, "sample_state": state,
        "out_ids": torch.full((rows + 2,), -7, dtype=torch.int32),
        "out_finite": torch.full((rows + 2,), -7, dtype=torch.int32),
        "last_ids": torch.full((SLOTS,), -7, dtype=torch.int32),
        "token_ids": ints([-1, 3, -1, 4, -1, 5]),
    }  # fmt: skip
    kind = TensorType(str(dtype).removeprefix("torch."), ("R", VOCAB))
    workspace = torch.full((sample_workspace_bytes(kind, rows + 2),), 0xFF, dtype=torch.uint8)
    bound = Operands((logits,), (), (), step, workspace)
    for spec in sample_launches(kind, rows + 2, VALID):
        interpret_cuda.launch(spec, bound, rows + 2)
    interpret_cuda.launch(fill_launch(), bound, rows + 2)
    wanted = sampler.sample(logits[:rows].float().numpy(), slots.numpy(), positions.numpy())
    for r in range(rows):
        finite = bool(wanted.finite[r])
        got = [int(step["out_ids"][r]), int(step["out_finite"][r]), int(step["last_ids"][slots[r]])]
        expected = [int(wanted.token_ids[r]), int(finite), int(wanted.token_ids[r])]
        got.append(int(step["token_ids"][r]))
        expected.append(expected[0] if r % 2 == 0 else 3 + r // 2)
        sys.stdout.write(
            json.dumps({"case": f"{kind.dtype} {seed}", "row": r, "got": got, "expected": expected}) + "\n"
        )
    untouched = step["out_ids"][rows:].tolist() + [int(x) for x in step["last_ids"] if int(x) == -7]
    sys.stdout.write(
        json.dumps({"case": f"{kind.dtype} {seed}", "row": -1, "got": untouched, "expected": [-7] * 4}) + "\n"
    )


if __name__ == "__main__":
    interpret_cuda.teach_bfloat16()
    for seed in range(3):
        check(torch.float32 if seed != 1 else torch.bfloat16, seed)
