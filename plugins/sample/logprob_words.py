"""What the CUDA kernels report of a row that wants logprobs.

`out_logprobs` is int32 [rows, LOGPROB_WORDS]:

    word 0        rank of the sampled id
    word 1        its raw logit, float32 bits
    word 2        the row's largest logit, float32 bits
    word 4, 5     sum of exp(logit - largest) over the row, float64 bits, low word first
    word 8 ...    ids of the top DEVICE_LOGPROBS in rank order, as many as were asked for
    behind them   their raw logits, float32 bits

Words 3, 6 and 7 are not written.
"""

from __future__ import annotations

import numpy as np

from tapeout.plugins.sample.result import Logprob, ranked_logprobs

DEVICE_LOGPROBS = 20  # most that a row can report
LOGPROB_WORDS = 8 + 2 * DEVICE_LOGPROBS


def read_logprobs(words: np.ndarray, token_id: int, top_n: int, vocab_size: int) -> dict[int, Logprob]:
    """The logprobs of one row: `sampler.top_logprobs` within 2e-6.

    Args:
        words: int32 [LOGPROB_WORDS]. top_n: how many were asked for; the vocabulary may have fewer.
    """
    top_n = min(top_n, vocab_size)
    floats, start = words.view(np.float32), 8 + DEVICE_LOGPROBS
    log_total = float(floats[2]) + float(np.log(words[4:6].view(np.float64)[0]))
    top = zip(words[8 : 8 + top_n].tolist(), floats[start : start + top_n].tolist(), strict=True)
    return ranked_logprobs(token_id, float(floats[1]), int(words[0]), top, log_total)
