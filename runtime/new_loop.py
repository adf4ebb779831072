"""The loop with its schedulers and page tables, put together in one place for engines and simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from tapeout.runtime.kv_cache import KvCache, PrefixCacheOptions
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.observe import Observer
from tapeout.runtime.scheduler.capacity import CapacityScheduler
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.step import Executor


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """What the schedulers of one process are given. `chunk_tokens` None = no limit of its own."""

    max_batch_size: int
    max_num_tokens: int
    chunk_tokens: int | None = None
    capacity_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT
    chunking_policy: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED

    def with_limits(self, max_batch_size: int, max_num_tokens: int) -> Self:
        return replace(self, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)


def new_loop(
    executor: Executor,
    options: SchedulerOptions,
    *,
    cache_options: PrefixCacheOptions | None = None,
    weights: str = "",
    overlap: bool = True,
    on_step: Callable[[StepRecord], None] | None = None,
    observer: Observer | None = None,
) -> EngineLoop:
    """A loop over the executor's whole pool, with nothing queued. `weights`: their digest."""
    limits, num_pages = executor.limits, executor.num_pages
    cache = KvCache(
        num_pages=num_pages,
        tokens_per_page=limits.tokens_per_page,
        num_slots=options.max_batch_size,
        max_seq_len=limits.max_seq_len,
        options=cache_options,
        host_pages=executor.host_pages,
        weights=weights,
    )
    capacity = CapacityScheduler(
        num_pages=num_pages,
        tokens_per_page=limits.tokens_per_page,
        max_batch_size=options.max_batch_size,
        policy=options.capacity_policy,
    )
    microbatch = MicroBatchScheduler(
        max_num_tokens=options.max_num_tokens,
        chunk_tokens=options.chunk_tokens,
        tokens_per_page=limits.tokens_per_page,
        policy=options.chunking_policy,
    )
    return EngineLoop(
        executor, cache, capacity, microbatch, overlap=overlap, on_step=on_step, observer=observer
    )
