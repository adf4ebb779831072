"""A stand-in for a CUDA engine's kernels: after token n comes n + 1, as logits and as sampled ids."""

from __future__ import annotations

import ctypes

import numpy as np
from fake_cuda import Launched, words

from tapeout.plugins.cuda import TURNS
from tapeout.plugins.sample.logprob_words import DEVICE_LOGPROBS, LOGPROB_WORDS
from tapeout.plugins.sample.state import SAMPLE_STATE_WORDS
from tapeout.runtime.engine import Engine
from tapeout.runtime.executors.cuda import CudaExecutor


class NextToken:
    """Receives a step as the kernel of that name does, writes logits that prefer id + 1, samples that, and
    reports logprobs where a slot asks for them."""

    def __init__(self, executor: CudaExecutor, engine: Engine) -> None:
        self._address, self._logits = executor._steps.address, executor._replay.logits_address()
        self._view, self._dtype = engine.program.logits, engine.program.logits.dtype
        self._batch = engine.manifest.limits.max_batch_size
        self._ids: list[int] = []
        self._rows = np.zeros((0, 0), np.float32)

    def __call__(self, launched: Launched) -> None:
        if launched.symbol == "receive":
            self._receive(*(int(v) for v in launched.values))
        elif launched.symbol == "choose":
            counts, row_ids, row_seqs, _, slots, _, out_ids, last_ids, _, _, turns, outbox, box_words = map(
                int, launched.values[4:17]
            )
            r = words(counts, 5)[4]
            outbox += 4 * box_words * ((words(turns, 1)[0] - 1) % TURNS)
            for i, row in enumerate(words(row_ids, r)):
                slot, chosen = self._slot(row_seqs, slots, row), self._ids[row] + 1
                for address in (out_ids + 4 * i, last_ids + 4 * slot, outbox + 4 * i):
                    ctypes.c_int32.from_address(address).value = chosen
                ctypes.c_int32.from_address(outbox + 2 * box_words + 4 * i).value = 1
        elif launched.symbol == "merge_logprobs":
            counts, row_ids, row_seqs, slots, state, out_ids, out = map(int, launched.values[5:12])
            r = words(counts, 5)[4]
            for i, row in enumerate(words(row_ids, r)):
                slot = self._slot(row_seqs, slots, row)
                top_n = words(state + 4 * (SAMPLE_STATE_WORDS * slot + 12), 1)[0]
                if top_n >= 0:
                    reported = logprob_words(self._rows[i], words(out_ids + 4 * i, 1)[0], top_n)
                    ctypes.memmove(out + 4 * LOGPROB_WORDS * i, reported.tobytes(), 4 * LOGPROB_WORDS)

    @staticmethod
    def _slot(row_seqs: int, slots: int, row: int) -> int:
        return words(slots + 4 * words(row_seqs + 4 * row, 1)[0], 1)[0]

    def _receive(self, turns: int, inbox: int, counts: int, *others: int) -> None:
        token_ids, last_ids, box_words = others[4], others[8], others[9]
        turn = words(turns, 1)[0]
        row_ids = self._address("row_ids")
        asked = words(row_ids, self._batch)
        ctypes.memmove(counts, inbox + 4 * box_words * (turn % TURNS), 4 * box_words)
        ctypes.c_int32.from_address(turns).value = turn + 1
        t, _, _, _, r = words(counts, 5)
        (ctypes.c_int32 * (self._batch - r)).from_address(row_ids + 4 * r)[:] = asked[r:]  # stay as they were
        ids = [i if i >= 0 else words(last_ids + 4 * (-1 - i), 1)[0] for i in words(token_ids, t)]
        (ctypes.c_int32 * t).from_address(token_ids)[:] = ids
        self._ids = ids
        logits = np.zeros((r, self._view.strides[0]), np.float32)
        for i, row in enumerate(words(self._address("row_ids"), r)):
            logits[i, ids[row] + 1] = 1.0
        self._rows = logits[:, : self._view.shape[1]]
        raw = logits.tobytes()
        if self._dtype == "bfloat16":
            raw = (logits.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        ctypes.memmove(self._logits, raw, len(raw))


def logprob_words(row: np.ndarray, token_id: int, top_n: int) -> np.ndarray:
    """What the kernels report of a row of logits: see plugins/sample/logprob_words.py."""
    reported = np.zeros(LOGPROB_WORDS, np.int32)
    floats, order = reported.view(np.float32), np.argsort(-row, kind="stable")
    reported[0] = order.tolist().index(token_id) + 1
    floats[1:3] = row[token_id], row.max()
    reported[4:6].view(np.float64)[0] = np.exp(row - row.max()).sum(dtype=np.float64)
    top, start = order[:top_n], 8 + DEVICE_LOGPROBS
    reported[8 : 8 + len(top)], floats[start : start + len(top)] = top, row[top]
    return reported
