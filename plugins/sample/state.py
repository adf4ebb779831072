"""The sampling state of a slot as the words a CUDA kernel reads.

`sample_state` is int32 [slots, SAMPLE_STATE_WORDS]; a row is written when a request is admitted:

    word 0, 1   seed, low word first
    word 2      temperature, float32 bits; 0 = greedy
    word 3      top_k; 0 = off
    word 4, 5   top_p, float64 bits, low word first
    word 6, 7   min_p, float64 bits, low word first
"""

from __future__ import annotations

import struct

import numpy as np

from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.sample.params import SamplingParams

SAMPLE_STATE_WORDS = 8


def device_unsupported(params: SamplingParams) -> str | None:
    """Why the CUDA kernels cannot sample with these parameters; None when they can.

    Such rows are sampled on the host from copied logits.
    """
    reasons = []
    if params.has_penalties:
        reasons.append("penalties")
    if params.min_tokens > 0:
        reasons.append("min_tokens")
    if params.logprobs is not None:
        reasons.append("logprobs")
    return f"{', '.join(reasons)} run on the host" if reasons else None


def state_words(params: SamplingParams) -> np.ndarray:
    """int32 [SAMPLE_STATE_WORDS] of a request; UnsupportedError for what `device_unsupported` names."""
    if reason := device_unsupported(params):
        raise UnsupportedError(f"sampling parameters cannot be put on the device: {reason}")
    temperature = 0.0 if params.greedy else params.temperature
    packed = struct.pack("<Qfidd", params.seed or 0, temperature, params.top_k, params.top_p, params.min_p)
    return np.frombuffer(packed, dtype=np.int32).copy()
