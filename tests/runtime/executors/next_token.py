"""A stand-in for a CUDA engine's kernels: after token n comes n + 1, as logits and as sampled ids."""

from __future__ import annotations

import ctypes

import numpy as np
from fake_cuda import Launched, words

from tapeout.runtime.engine import Engine
from tapeout.runtime.executors.cuda import CudaExecutor
from tapeout.runtime.step import FROM_SLOT


class NextToken:
    """Fills FROM_SLOT ids as the fill kernel does, writes logits that prefer id + 1, samples that."""

    def __init__(self, executor: CudaExecutor, engine: Engine) -> None:
        self._address, self._logits = executor._steps.address, executor._replay.logits_address()
        self._view, self._dtype = engine.program.logits, engine.program.logits.dtype
        self._ids: list[int] = []

    def __call__(self, launched: Launched) -> None:
        if launched.symbol == "fill_token_ids":
            self._fill(*(int(v) for v in launched.values[:5]))
        elif launched.symbol == "choose":
            counts, row_ids, row_seqs, _, slots, _, out_ids, out_finite, last_ids = map(
                int, launched.values[4:13]
            )
            r = words(counts, 5)[4]
            for i, row in enumerate(words(row_ids, r)):
                slot = words(slots + 4 * words(row_seqs + 4 * row, 1)[0], 1)[0]
                for address, value in (
                    (out_ids + 4 * i, self._ids[row] + 1), (out_finite + 4 * i, 1),
                    (last_ids + 4 * slot, self._ids[row] + 1),
                ):  # fmt: skip
                    ctypes.c_int32.from_address(address).value = value

    def _fill(self, token_ids: int, counts: int, row_seqs: int, slots: int, last_ids: int) -> None:
        t, _, _, _, r = words(counts, 5)
        ids = words(token_ids, t)
        for i, seq in enumerate(words(row_seqs, t)):
            if ids[i] == FROM_SLOT:
                ids[i] = words(last_ids + 4 * words(slots + 4 * seq, 1)[0], 1)[0]
        self._ids = ids
        logits = np.zeros((r, self._view.strides[0]), np.float32)
        for i, row in enumerate(words(self._address("row_ids"), r)):
            logits[i, ids[row] + 1] = 1.0
        raw = logits.tobytes()
        if self._dtype == "bfloat16":
            raw = (logits.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        ctypes.memmove(self._logits, raw, len(raw))
