"""How many pages the KV pool gets: the smallest of what memory, options and limits allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from tapeout.plugins.errors import CapacityError, UsageError
from tapeout.plugins.sample.params import shown
from tapeout.runtime.engine.manifest import Limits


@dataclass(frozen=True)
class KvBudget:
    """The pool's size and why.

    `candidates` are pages by bound, `winner` is the bound that decided.
    """

    num_pages: int
    tokens_per_page: int
    page_bytes: int
    winner: str
    candidates: Mapping[str, int]

    @property
    def tokens(self) -> int:
        return self.num_pages * self.tokens_per_page

    @property
    def bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def describe(self) -> str:
        """One log line."""
        others = ", ".join(f"{name} {n}" for name, n in self.candidates.items() if name != self.winner)
        return (
            f"KV cache: {self.num_pages} pages = {self.tokens} tokens, {self.bytes / 2**20:.1f} MiB; "
            f"set by {self.winner} (others allow, in pages: {others or 'none given'})"
        )


def plan_kv_pool(
    *,
    limits: Limits,
    page_bytes: int,
    free_bytes: int,
    free_memory_fraction: float = 0.9,
    max_tokens: int | None = None,
    kv_cache_bytes: int | None = None,
) -> KvBudget:
    """Size the pool.

    Bounds: `free_memory_fraction` of `free_bytes` (memory left after weights and arena),
    `max_tokens_in_kv_cache`, `kv_cache_bytes`, and what the engine's limits can use at all
    (max_batch_size sequences of max_seq_len). The smallest wins; on a tie the one named first.

    Raises:
        UsageError: an option out of range, all offenders at once.
        CapacityError: the winner leaves less than one page.
    """
    problems = []
    if not _is(free_memory_fraction, Real) or not 0 < free_memory_fraction <= 1:
        problems.append(f"free_memory_fraction = {shown(free_memory_fraction)}, expected a number in (0, 1]")
    for name, value, page, unit in (
        ("max_tokens_in_kv_cache", max_tokens, limits.tokens_per_page, "tokens"),
        ("kv_cache_bytes", kv_cache_bytes, page_bytes, "bytes"),
    ):
        if value is not None and (not _is(value, Integral) or value < page):
            problems.append(
                f"{name} = {shown(value)}, expected an integer, at least one page of {page} {unit}"
            )
    if problems:
        raise UsageError(
            "invalid KV cache options:\n" + "\n".join(f"  {p}" for p in problems),
            hint="leave them out to use the memory that is free",
        )
    candidates = {}
    if kv_cache_bytes is not None:
        candidates["kv_cache_bytes"] = kv_cache_bytes // page_bytes
    if max_tokens is not None:
        candidates["max_tokens_in_kv_cache"] = max_tokens // limits.tokens_per_page
    candidates["engine limits"] = limits.pool_pages
    candidates["free_memory_fraction"] = int(free_bytes * free_memory_fraction) // page_bytes
    winner = min(candidates, key=lambda name: candidates[name])
    if candidates[winner] < 1:
        raise CapacityError(
            f"no memory for the KV cache: {free_bytes / 2**20:.1f} MiB left x free_memory_fraction "
            f"{free_memory_fraction:g} is less than one page of {page_bytes / 2**20:.2f} MiB",
            hint="free memory, or use a smaller model or cache dtype",
        )
    return KvBudget(candidates[winner], limits.tokens_per_page, page_bytes, winner, candidates)


def _is(value: Any, kind: type) -> bool:
    """Whether a value is a number of that kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)
