"""Values of made-up operands: a hash of (seed, row, column), the same in numpy and on the GPU.

Any element is known without making the others, so that a builder computes a few results of a matrix
that it could not hold. `triton.py` holds the same functions; a test compares them bit by bit.
"""

from __future__ import annotations

import zlib

import numpy as np

#: Standard deviation of the sum of four bytes, and their mean.
BYTES_DEVIATION, BYTES_MEAN = 147.79719, 510

_ROW, _COLUMN = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def seed_of(text: str) -> int:
    """A seed (31 bits) from a name; the same on every machine."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def hashed(seed: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """uint32 [rows, columns]: words of the elements at the given row and column numbers."""
    start = _mixed(rows.astype(np.uint32) * _ROW + np.uint32(seed))
    return _mixed(start[:, None] ^ (columns.astype(np.uint32) * _COLUMN)[None, :])


def normals(seed: int, rows: np.ndarray, columns: np.ndarray, scale: float) -> np.ndarray:
    """float32 [rows, columns], about normal with mean 0: sums of four bytes, times `scale`.

    `scale` is what `factor_of` gives for a standard deviation.
    """
    word = hashed(seed, rows, columns)
    total = sum(((word >> np.uint32(shift)) & np.uint32(0xFF) for shift in (8, 16, 24)), word & 0xFF)
    return (total.astype(np.int32) - BYTES_MEAN).astype(np.float32) * np.float32(scale)


def integers(seed: int, rows: np.ndarray, columns: np.ndarray, high: int) -> np.ndarray:
    """int32 [rows, columns] from 0 to high - 1."""
    return (hashed(seed, rows, columns) % np.uint32(high)).astype(np.int32)


def factor_of(deviation: float) -> float:
    """The factor that gives `normals` a standard deviation; a float32 number."""
    return float(np.float32(deviation / BYTES_DEVIATION))


def permutation(seed: int, count: int) -> np.ndarray:
    """int32 [count]: the numbers below `count` in an order that the seed decides."""
    words = hashed(seed, np.zeros(1, np.uint32), np.arange(count))[0]
    return np.argsort(words, kind="stable").astype(np.int32)


def _mixed(word: np.ndarray) -> np.ndarray:
    """A 32-bit finalizer (Wellons, "Prospecting for hash functions", lowbias32)."""
    word = word ^ (word >> np.uint32(16))
    word = word * _FIRST
    word = word ^ (word >> np.uint32(15))
    word = word * _SECOND
    return word ^ (word >> np.uint32(16))
