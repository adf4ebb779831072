"""Run the sampling kernels in Triton's interpreter: `python interpret_sample.py`.

Prints one JSON object a row: {"case", "row", "got", "expected"}; `expected` is what the numpy sampler says.
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
from tapeout.plugins.cuda import TURNS
from tapeout.plugins.sample.cuda import sample_launches, sample_workspace_bytes
from tapeout.plugins.sample.logprob_words import LOGPROB_WORDS, read_logprobs
from tapeout.plugins.sample.params import SamplingParams
from tapeout.plugins.sample.result import Logprob
from tapeout.plugins.sample.sampler import Sampler, ending_ids
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS, bits_row, counts_row, id_bits, state_words
from tapeout.plugins.triton_aot.operands import Operands

EOS = (1,)
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
    state = torch.full((SLOTS, SAMPLE_STATE_WORDS), 0x7F7F7F7F, dtype=torch.int32)
    sampler = Sampler(SLOTS, VOCAB, VALID, ())
    for slot, params in zip(slots.tolist(), PARAMS, strict=True):
        state[slot] = torch.from_numpy(state_words(params))
        sampler.admit(slot, params, np.zeros(0, dtype=np.int64))
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator, dtype=torch.int32)
    step = {
        "counts": ints([rows, rows, 1, 1, rows]), "row_ids": torch.arange(rows, dtype=torch.int32),
        "row_seqs": seq_of_row, "positions": positions, "seq_slots": slots, "sample_state": state,
        "out_ids": torch.full((rows + 2,), -7, dtype=torch.int32),
        "turns": ints([6, 0]), "outbox": torch.full((TURNS, 2, rows + 2), -7, dtype=torch.int32),
        "last_ids": torch.full((SLOTS,), -7, dtype=torch.int32),
        "sample_bits": ints([]), "output_counts": ints([]),
    }  # fmt: skip
    kind = TensorType(str(dtype).removeprefix("torch."), ("R", VOCAB))
    workspace = torch.full((sample_workspace_bytes(kind, rows + 2),), 0xFF, dtype=torch.uint8)
    bound = Operands((logits,), (), (), step, workspace, scalars={"outbox_words": 2 * (rows + 2)})
    for spec in sample_launches(kind, rows + 2, VALID):
        interpret_cuda.launch(spec, bound, rows + 2)
    wanted = sampler.sample(logits[:rows].float().numpy(), slots.numpy(), positions.numpy())
    for r in range(rows):
        finite = bool(wanted.finite[r])
        chosen = int(wanted.token_ids[r])
        got = [int(step["out_ids"][r]), *step["outbox"][1, :, r].tolist(), int(step["last_ids"][slots[r]])]
        expected = [chosen, chosen, int(finite), chosen]
        tell(f"{kind.dtype} {seed}", r, got, expected)
    untouched = step["out_ids"][rows:].tolist() + [int(x) for x in step["last_ids"] if int(x) == -7]
    untouched += step["outbox"][1, :, rows:].flatten().tolist() + step["outbox"][[0, 2, 3]].flatten().tolist()
    tell(f"{kind.dtype} {seed}", -1, sorted(set(untouched)), [-7])


class Steps:
    """Steps of the full kernels over slots that keep their state, beside the numpy sampler."""

    def __init__(self, kind: TensorType, valid: int) -> None:
        self.kind, self.vocab, self.valid = kind, int(kind.shape[1]), valid
        self.sampler = Sampler(SLOTS, self.vocab, valid, EOS)
        self.params: dict[int, SamplingParams] = {}
        # Garbage: what no request of a slot has asked for must not be read.
        self.state = torch.full((SLOTS, SAMPLE_STATE_WORDS), 0x7F7F7F7F, dtype=torch.int32)
        self.bits = torch.full((SLOTS, 2, bits_row(self.vocab)), -1, dtype=torch.int32)
        self.counts = torch.full((SLOTS, counts_row(self.vocab)), 9, dtype=torch.int32)

    def admit(self, slot: int, params: SamplingParams, prompt: np.ndarray) -> None:
        self.sampler.admit(slot, params, prompt)
        self.params[slot] = params
        self.state[slot] = torch.from_numpy(state_words(params))
        if params.has_penalties:
            self.bits[slot, 0] = torch.from_numpy(id_bits(prompt, self.vocab))
            self.counts[slot] = 0
        if params.min_tokens:
            masked = ending_ids(params, EOS, self.vocab)
            self.bits[slot, 1] = torch.from_numpy(id_bits(masked, self.vocab))

    def run(self, label: str, logits: torch.Tensor, slots: list[int], positions: list[int]) -> None:
        rows, bucket = len(slots), len(slots) + 2
        step = {
            "counts": ints([rows, rows, 1, 1, rows]), "row_ids": torch.arange(rows, dtype=torch.int32),
            "row_seqs": torch.arange(rows, dtype=torch.int32), "positions": ints(positions),
            "seq_slots": ints(slots), "sample_state": self.state, "sample_bits": self.bits,
            "output_counts": self.counts, "out_ids": torch.full((bucket,), -7, dtype=torch.int32),
            "turns": ints([5, 0]), "outbox": torch.full((TURNS, 2, bucket), -7, dtype=torch.int32),
            "last_ids": torch.full((SLOTS,), -7, dtype=torch.int32),
            "out_logprobs": torch.full((bucket, LOGPROB_WORDS), -7, dtype=torch.int32),
        }  # fmt: skip
        size = sample_workspace_bytes(self.kind, bucket, full=True)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
        bound = Operands((logits,), (), (), step, workspace, scalars={"outbox_words": 2 * bucket})
        for spec in sample_launches(self.kind, bucket, self.valid, full=True):
            interpret_cuda.launch(spec, bound, bucket)
        wanted = self.sampler.sample(logits[:rows].float().numpy(), np.array(slots), np.array(positions))
        for r, slot in enumerate(slots):
            chosen, finite = int(wanted.token_ids[r]), bool(wanted.finite[r])
            got = [int(step["out_ids"][r]), *step["outbox"][0, :, r].tolist(), int(step["last_ids"][slot])]
            expected: list[object] = [chosen, chosen, int(finite), chosen]
            state = self.sampler._slots[slot]
            got.append(int(self.state[slot, 14]))
            expected.append(state.num_sampled)
            if state.counts is not None:
                counts = torch.from_numpy(state.counts)
                got.append(torch.equal(self.counts[slot, : self.valid], counts))
                expected.append(True)
            top_n, words = self.params[slot].logprobs, step["out_logprobs"][r].numpy()
            if top_n is None:
                got += words.tolist()
                expected += [-7] * LOGPROB_WORDS
            elif finite:
                got += agreement(read_logprobs(words, chosen, top_n, self.vocab), wanted.logprobs[r])
                expected += agreement(wanted.logprobs[r], wanted.logprobs[r])
            tell(label, r, got, expected)
        untouched = [step["out_ids"][rows:], step["out_logprobs"][rows:], step["outbox"][0, :, rows:]]
        tell(label, -1, [bool((x == -7).all()) for x in untouched], [True] * 3)


def agreement(found: dict[int, Logprob], wanted: dict[int, Logprob]) -> list[object]:
    """Ids and ranks in order, and whether the logprobs are near."""
    near = [abs(found[i].logprob - wanted[i].logprob) <= 2e-6 for i in wanted if i in found]
    return [*((i, p.rank) for i, p in found.items()), *near]


def tell(case: str, row: int, got: object, expected: object) -> None:
    sys.stdout.write(json.dumps({"case": case, "row": row, "got": got, "expected": expected}) + "\n")


def check_full(dtype: torch.dtype, num_steps: int) -> None:
    """Several steps over the same few likely ids, so that counts and minimums matter."""
    generator = torch.Generator().manual_seed(7)
    kind = TensorType(str(dtype).removeprefix("torch."), ("R", VOCAB))
    steps, prompt = Steps(kind, VALID), np.array([4, 5, 70, 70, 4090, 4998, 5001])
    params = (
        SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=9),
        SamplingParams(temperature=0, presence_penalty=1.1, frequency_penalty=0.7),
        SamplingParams(temperature=0, frequency_penalty=-1.5, repetition_penalty=0.6, logprobs=3),
        SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(4, 70, 4100), logprobs=20),
        SamplingParams(temperature=1.5, seed=3, presence_penalty=2.0, frequency_penalty=0.3, logprobs=0),
        SamplingParams(temperature=0.8, seed=4, top_k=3, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=2**64 - 1, min_p=0.1, logprobs=1),
    )
    for slot, request in enumerate(params):
        steps.admit(slot, request, prompt)
    likely = torch.tensor([1, 4, 5, 70, 4090, 4095, 4096, 4100])
    for number in range(num_steps):
        wide = torch.randn((len(params) + 2, VOCAB + 16), generator=generator)
        wide[:, likely] = 8 + 2 * torch.rand((len(params) + 2, len(likely)), generator=generator)
        wide[:, VALID:] += 20  # never chosen, but they have logprobs
        wide[2, 4090:4100] = wide[2, 300:310] = 10.0  # ranks among equals, in two chunks
        wide[3, ::7] = -0.0
        if number == 3:
            wide[4, 4500] = torch.nan
            wide[0, 70], wide[5, 4] = 3e38, -3e38
        order = torch.randperm(len(params), generator=generator).tolist()[: 7 - number % 2]
        logits = wide.to(dtype)[[*order, -1, -2]][:, :VOCAB]
        steps.run(f"full {kind.dtype} step {number}", logits, order, [100 + number] * len(order))
        if number == 2:  # another request takes a slot; nothing of the first may be left
            steps.admit(2, SamplingParams(temperature=0, presence_penalty=2.0, min_tokens=1), prompt[:2])
            steps.admit(6, SamplingParams(temperature=0, repetition_penalty=2.0, logprobs=2), prompt[2:])


def check_extremes() -> None:
    """Rows without a choice, and a vocabulary smaller than the number of logprobs."""
    steps = Steps(TensorType("float32", ("R", 16)), 16)
    everything, prompt = tuple(range(16)), np.array([2])
    steps.admit(0, SamplingParams(temperature=0, min_tokens=3, stop_token_ids=everything, logprobs=2), prompt)
    steps.admit(1, SamplingParams(temperature=0.5, seed=1, repetition_penalty=1e-3), prompt)
    steps.admit(2, SamplingParams(temperature=0, logprobs=20), prompt)
    steps.admit(3, SamplingParams(temperature=0, min_tokens=9, max_tokens=9, ignore_eos=True), prompt)
    logits = torch.randn((6, 16), generator=torch.Generator().manual_seed(1))
    logits[1, 2] = 3e38  # infinite when divided by the penalty
    for number in range(2):
        steps.run(f"extremes {number}", logits, [0, 1, 2, 3], [number] * 4)


if __name__ == "__main__":
    interpret_cuda.teach_bfloat16()
    interpret_cuda.patch_once()
    for seed in range(3):
        check(torch.float32 if seed != 1 else torch.bfloat16, seed)
    check_full(torch.float32, 5)
    check_full(torch.bfloat16, 2)
    check_extremes()
