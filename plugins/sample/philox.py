"""Philox4x32-10, the counter-based generator behind every draw.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11. A draw is a function of
(seed, position) alone, so it does not depend on the batch, on the target or on earlier draws.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
_MUL = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_BUMP = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Four random words per counter.

    Args:
        counters: [N, 4] uint32. keys: [N, 2] uint32.

    Returns:
        [N, 4] uint32.
    """
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (keys[:, i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        p0, p1 = _MUL[0] * c0, _MUL[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_BUMP[0])) & _LOW, (k1 + np.uint64(_BUMP[1])) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def draw_u64(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One 64-bit word per row: [N] uint64 from seeds [N] uint64 and positions [N] integer.

    Key = seed (low word first), counter = (position low, position high, 0, 0); the result is
    output word 0 as the high half and word 1 as the low half.
    """
    position = positions.astype(np.uint64)
    counters = np.zeros((len(seeds), 4), dtype=np.uint32)
    counters[:, 0], counters[:, 1] = position & _LOW, position >> _32
    keys = np.stack((seeds & _LOW, seeds >> _32), axis=1).astype(np.uint32)
    words = philox4x32(counters, keys).astype(np.uint64)
    return (words[:, 0] << _32) | words[:, 1]
