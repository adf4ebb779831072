"""Token ids that are a pure function of a seed, so that any engine can be given the same prompts."""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = (np.uint64(n) for n in (30, 27, 31, 32))


def splitmix64(z: np.ndarray) -> np.ndarray:
    """One step of the generator splitmix64 for each uint64, modulo 2^64."""
    z = z + _GAMMA
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


def prompt_ids(seed: int, length: int, low: int, high: int) -> np.ndarray:
    """int32 [length]: `token(seed, j) = low + splitmix64(seed * 2^32 + j) mod (high - low)`."""
    base = np.uint64(seed % (1 << 32)) << _S32
    mixed = splitmix64(base + np.arange(length, dtype=np.uint64))
    return (np.uint64(low) + mixed % np.uint64(high - low)).astype(np.int32)
