"""The sampling state of a slot as a CUDA kernel reads it.

`sample_state` is int32 [slots, SAMPLE_STATE_WORDS]; a row is written when a request is admitted:

    word 0, 1   seed, low word first
    word 2      temperature, float32 bits; 0 = greedy
    word 3      top_k; 0 = off
    word 4, 5   top_p, float64 bits, low word first
    word 6, 7   min_p, float64 bits, low word first
    word 8      repetition penalty, float32 bits
    word 9      frequency penalty, float32 bits
    word 10     presence penalty, float32 bits
    word 11     min_tokens, at most 2**31 - 1
    word 12     top logprobs to report; -1 = none, 0 = the sampled id's only
    word 13     1 = any penalty is on
    word 14     ids sampled so far; the kernels' own once it is written
    word 15     0

`sample_bits` is int32 [slots, 2, bits_row(V)]: the ids of the prompt, then those that `min_tokens` masks,
bit i of word w for id 32 * w + i. `output_counts` is int32 [slots, counts_row(V)]: how often the slot
sampled each id; the kernels' own, set when a request with penalties is admitted: to zero, or to what it
sampled before it was paused.
"""

from __future__ import annotations

import struct

import numpy as np

from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.sample.logprob_words import DEVICE_LOGPROBS
from tapeout.plugins.sample.params import SamplingParams

SAMPLE_STATE_WORDS = 16
_MOST_TOKENS = 2**31 - 1


def device_unsupported(params: SamplingParams) -> str | None:
    """Why the CUDA kernels cannot sample with these parameters; None when they can.

    Such rows are sampled on the host from copied logits.
    """
    if params.logprobs is not None and params.logprobs > DEVICE_LOGPROBS:
        return f"{params.logprobs} logprobs, the device reports at most {DEVICE_LOGPROBS}"
    return None


def needs_full(params: SamplingParams) -> bool:
    """True for what only the full kernels do: penalties, min_tokens, logprobs."""
    return params.has_penalties or params.min_tokens > 0 or params.logprobs is not None


def state_words(params: SamplingParams, num_sampled: int = 0) -> np.ndarray:
    """int32 [SAMPLE_STATE_WORDS] of a request that has sampled so many ids.

    Raises:
        UnsupportedError: for what `device_unsupported` names.
    """
    if reason := device_unsupported(params):
        raise UnsupportedError(f"sampling parameters cannot be put on the device: {reason}")
    packed = struct.pack(
        "<Qfiddfffiiiii",
        params.seed or 0,
        0.0 if params.greedy else params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        min(params.min_tokens, _MOST_TOKENS),
        -1 if params.logprobs is None else params.logprobs,
        params.has_penalties,
        num_sampled,
        0,
    )
    return np.frombuffer(packed, dtype=np.int32).copy()


def id_bits(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [bits_row(V)] with the bits of `ids`; those outside the vocabulary are left out."""
    flags = np.zeros(32 * bits_row(vocab_size), bool)
    flags[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def bits_row(vocab_size: int) -> int:
    """int32 words of one set of ids: whole 16 bytes."""
    return -(-vocab_size // 128) * 4


def counts_row(vocab_size: int) -> int:
    """Elements of a slot's counts: whole 64 bytes, so that kernels may load 16 at once."""
    return -(-vocab_size // 16) * 16
