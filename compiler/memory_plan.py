"""The static memory plan: where each activation lies in the arena.

Greedy by size, the published best-fit approach (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", 2020, algorithm 3): buffers are placed from the
largest down, each into the smallest gap that fits among the buffers alive with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapeout.plugins.errors import TapeoutError


@dataclass(frozen=True)
class BufferRequest:
    """`size_bytes` alive from record `first` (its writer) to `last` (its last reader), both included."""

    name: str
    size_bytes: int
    first: int
    last: int

    def overlaps(self, other: BufferRequest) -> bool:
        """Alive at the same time."""
        return self.first <= other.last and other.first <= self.last


def plan_arena(requests: Sequence[BufferRequest], alignment: int = 64) -> tuple[Mapping[str, int], int]:
    """Offsets by name, in the order of `requests`, and the arena's size in bytes.

    Two buffers alive at the same record never share a byte; every offset and the arena size
    are multiples of `alignment`. The plan depends only on the requests, not on their order
    when sizes, lifetimes and names tell them apart. Raises TapeoutError, all offenders at once.
    """
    _check(requests, alignment)
    placed: list[tuple[int, int, BufferRequest]] = []  # (offset, end, request) by ascending offset
    offsets: dict[str, int] = {}
    arena_bytes = 0
    for request in sorted(requests, key=lambda r: (-r.size_bytes, r.first, r.last, r.name)):
        size = _align(request.size_bytes, alignment)
        offset = _best_gap([p for p in placed if p[2].overlaps(request)], size)
        offsets[request.name] = offset
        placed.append((offset, offset + size, request))
        placed.sort(key=lambda p: (p[0], p[1]))
        arena_bytes = max(arena_bytes, offset + size)
    return {r.name: offsets[r.name] for r in requests}, arena_bytes


def _best_gap(neighbours: Sequence[tuple[int, int, BufferRequest]], size: int) -> int:
    """The offset of the smallest gap between `neighbours` that holds `size` bytes, else their end."""
    best, best_gap, end = -1, 0, 0
    for offset, stop, _ in neighbours:
        gap = offset - end
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = end, gap
        end = max(end, stop)
    return best if best >= 0 else end


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _check(requests: Sequence[BufferRequest], alignment: int) -> None:
    if alignment < 1:
        raise TapeoutError(f"alignment is {alignment}, expected at least 1")
    seen: set[str] = set()
    bad: list[str] = []
    for r in requests:
        if r.name in seen:
            bad.append(f"{r.name}: requested twice")
        seen.add(r.name)
        if r.size_bytes < 0:
            bad.append(f"{r.name}: size {r.size_bytes} bytes is negative")
        if not 0 <= r.first <= r.last:
            bad.append(f"{r.name}: lifetime [{r.first}, {r.last}] is not a range of records")
    if bad:
        raise TapeoutError("the memory plan cannot be made:\n" + "\n".join(f"  {line}" for line in bad))
