"""A scripted executor that keeps a real KV cache of token ids, and makers around it.

The fake stores the token id of every position in the page the scheduler gave it and computes each
next id from what it reads back through the page table. So a page shared wrongly, freed too early,
or filled in the wrong order changes tokens, as it would with a model.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cache_checks import check_cache

from tapeout.plugins.sample.params import SamplingParams
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import CopyKind, KvCache, PageCopy, PrefixCacheOptions
from tapeout.runtime.kv_cache.radix_tree import PageHash, page_hash
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.observe import Observer
from tapeout.runtime.scheduler.capacity import CapacityScheduler
from tapeout.runtime.scheduler.microbatch import MicroBatchScheduler
from tapeout.runtime.scheduler.policies import CapacityPolicy, ChunkingPolicy
from tapeout.runtime.scheduler.record import StepRecord
from tapeout.runtime.scheduler.request import Finish, Request, RequestTimes
from tapeout.runtime.step import FROM_SLOT, NO_IDS, Logprob, StepInputs, StepResult

Script = Callable[[Sequence[int]], int]
VOCAB = 23
VOCAB_SPAN = 1000  # a place in a page holds its token's id, and by what weights it was computed
EOS = 0


def hashed_next_id(tokens: Sequence[int]) -> int:
    """A "model": the next id depends on every token and its position."""
    state = 17
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % 2_147_483_647
    return state % VOCAB


def rarely_ending_id(tokens: Sequence[int]) -> int:
    """The same, but only every fourth of its EOS ids is one."""
    token = hashed_next_id(tokens)
    return token if token != EOS or len(tokens) % 4 == 0 else 1


def expected_ids(
    prompt: Sequence[int], max_tokens: int, script: Script = hashed_next_id, eos: int = EOS
) -> list[int]:
    """What a request alone must produce."""
    tokens, out = list(prompt), []
    while len(out) < max_tokens:
        out.append(script(tokens))
        tokens.append(out[-1])
        if out[-1] == eos:
            break
    return out


@dataclass
class FakeHandle:
    executor: FakeExecutor
    index: int

    def result(self) -> StepResult:
        return self.executor.read(self.index)


@dataclass
class FakeExecutor:
    """Runs steps lazily, at the latest moment the protocol allows: when one is read.

    `events` holds ("submit" | "read", step) in order. `fail_steps` raise when read, `refuse_steps`
    when submitted; `nan_when` marks rows not finite by their tokens.
    """

    limits: Limits
    num_pages: int
    script: Script = hashed_next_id
    fail_steps: frozenset[int] = frozenset()
    refuse_steps: frozenset[int] = frozenset()
    nan_when: Callable[[Sequence[int]], bool] = lambda tokens: False
    host_pages: int = 0
    fail_copies: bool = False
    weights: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    steps: list[StepInputs] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.pool = np.full((self.num_pages, self.limits.tokens_per_page), -7, dtype=np.int64)
        self.host_pool = np.full((self.host_pages, self.limits.tokens_per_page), -8, dtype=np.int64)
        self.last_ids = np.full(self.limits.max_batch_size, -9, dtype=np.int64)
        self.cached = np.zeros(self.limits.max_batch_size, dtype=np.int64)
        self.results: dict[int, StepResult | Exception] = {}

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray = NO_IDS,
    ) -> None:
        assert 0 <= slot < self.limits.max_batch_size
        self.cached[slot] = -1  # it begins wherever the prefix cache ends

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """At once, before the steps that have not run: copies may overtake them."""
        if self.fail_copies:
            raise RuntimeError("scripted failure of copies")
        self.copies += copies
        pools = {
            CopyKind.WITHIN: (self.pool, self.pool),
            CopyKind.OFFLOAD: (self.pool, self.host_pool),
            CopyKind.ONBOARD: (self.host_pool, self.pool),
        }
        unread = self.unread_pages()
        for kind, source, target in copies:
            origin, goal = pools[kind]
            assert kind is CopyKind.OFFLOAD or target not in unread, "a page an unread step uses is written"
            goal[target] = origin[source]

    def submit(self, inputs: StepInputs) -> FakeHandle:
        index = len(self.steps)
        self.steps.append(inputs)
        self.events.append(("submit", index))
        check_inputs(inputs, self.limits, self.num_pages)
        owners, per_page = self.unread_owners(), self.limits.tokens_per_page
        starts = inputs.kv_lens - np.diff(inputs.cu_q)
        for b, slot in enumerate(inputs.slots.tolist()):
            written = inputs.page_table[b, starts[b] // per_page : -(-inputs.kv_lens[b] // per_page)]
            assert all(owners.get(page, {slot}) == {slot} for page in written.tolist()), (
                "a page that another's unread step uses is written"
            )
        known = self.cached[inputs.slots]
        assert ((known < 0) | (starts == known)).all(), "a sequence must go on where it stopped"
        self.cached[inputs.slots] = inputs.kv_lens
        if index in self.refuse_steps:
            raise RuntimeError(f"scripted refusal of step {index}")
        return FakeHandle(self, index)

    def read(self, index: int) -> StepResult:
        self.events.append(("read", index))
        for i in range(index + 1):
            if i not in self.results and i not in self.refuse_steps:
                self.results[i] = self.run(i)
        result = self.results[index]
        if isinstance(result, Exception):
            raise result
        return result

    def unread_owners(self) -> dict[int, set[int]]:
        """Page to slots, of steps that were submitted before this one and have not run."""
        done = self.results.keys() | self.refuse_steps
        first = max(self.results, default=-1) + 1  # they run in order
        owners: dict[int, set[int]] = {}
        for step in (self.steps[i] for i in range(first, len(self.steps) - 1) if i not in done):
            for slot, pages in zip(step.slots.tolist(), step.page_table.tolist(), strict=True):
                for page in pages:
                    owners.setdefault(page, set()).add(slot)
        owners.pop(-1, None)
        return owners

    def unread_pages(self) -> set[int]:
        """Pages of steps that were submitted and have not run."""
        done = self.results.keys() | self.refuse_steps
        waiting = [s for i, s in enumerate(self.steps) if i not in done]
        return {int(p) for s in waiting for p in s.page_table.ravel() if p >= 0}

    def run(self, index: int) -> StepResult | Exception:
        if index in self.fail_steps:
            return RuntimeError(f"scripted failure of step {index}")
        step, per_page = self.steps[index], self.limits.tokens_per_page
        sampled: dict[int, tuple[int, bool]] = {}
        rows = set(step.row_ids.tolist())
        for b, slot in enumerate(step.slots.tolist()):
            first, end = int(step.cu_q[b]), int(step.cu_q[b + 1])
            for row in range(first, end):
                token = int(step.token_ids[row])
                token = int(self.last_ids[slot]) if token == FROM_SLOT else token
                page, place = divmod(int(step.positions[row]), per_page)
                self.pool[step.page_table[b, page], place] = token + VOCAB_SPAN * self.weights
            if end - 1 in rows:
                used = int(step.kv_lens[b])
                pages = step.page_table[b, : -(-used // per_page)]
                computed_by, ids = np.divmod(self.pool[pages].ravel()[:used], VOCAB_SPAN)
                # What a failed step has not written is of nobody's weights.
                assert not ((computed_by >= 0) & (computed_by != self.weights)).any(), (
                    "other weights' K and V"
                )
                tokens = np.where(computed_by < 0, -1, ids).tolist()
                sampled[slot] = (self.script(tokens), not self.nan_when(tokens))
                self.last_ids[slot] = sampled[slot][0]
        ordered = [sampled[slot] for slot in step.row_slots.tolist()]
        return StepResult(
            np.array([i for i, _ in ordered], dtype=np.int32),
            tuple({i: Logprob(-float(i), 1)} for i, _ in ordered),
            np.array([f for _, f in ordered], dtype=bool),
        )

    def load_weights(self, engine: Any) -> None:
        assert all(i in self.results or i in self.refuse_steps for i in range(len(self.steps)))
        self.weights += 1

    def close(self) -> None:
        self.closed = True


def check_inputs(inputs: StepInputs, limits: Limits, num_pages: int) -> None:
    """What every executor may rely on."""
    for name, value in vars(inputs).items():
        assert value.dtype == np.int32, name
    sizes = np.diff(inputs.cu_q)
    num_seqs, num_rows = len(sizes), int(inputs.cu_q[-1])
    assert inputs.cu_q[0] == 0
    assert (sizes > 0).all()
    assert 0 < num_seqs <= limits.max_batch_size
    assert 0 < num_rows <= limits.max_num_tokens
    assert len(inputs.token_ids) == len(inputs.positions) == num_rows
    assert len(set(inputs.slots.tolist())) == num_seqs
    assert (inputs.kv_lens <= limits.max_seq_len).all()
    generation = inputs.token_ids[inputs.cu_q[:-1]] == FROM_SLOT
    assert (np.diff(generation.astype(int)) >= 0).all(), "context must stand before generation"
    held: list[set[int]] = []
    written: list[set[int]] = []
    for b in range(num_seqs):
        first, end = inputs.cu_q[b], inputs.cu_q[b + 1]
        start = inputs.kv_lens[b] - sizes[b]
        assert (inputs.positions[first:end] == np.arange(start, inputs.kv_lens[b])).all()
        used = -(-int(inputs.kv_lens[b]) // limits.tokens_per_page)
        pages = inputs.page_table[b]
        assert ((pages[:used] >= 0) & (pages[:used] < num_pages)).all()
        held.append(set(pages[pages >= 0].tolist()))
        written.append(set(pages[int(start) // limits.tokens_per_page : used].tolist()))
    for b, pages in enumerate(written):
        others = set().union(*held[:b], *held[b + 1 :])
        assert not pages & others, "a page that is written belongs to two sequences"
    assert set(inputs.row_slots.tolist()) <= set(inputs.slots.tolist())
    assert (np.isin(inputs.row_ids, inputs.cu_q[1:] - 1)).all()


@dataclass
class RecordingSink:
    """Keeps what the loop hands out."""

    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    stop_after: int | None = None

    def on_token(self, token_id: int, logprobs: dict[int, Logprob] | None, ending: bool) -> str | None:
        assert self.finish is None, "a token after the end"
        self.token_ids.append(token_id)
        return "STOP" if len(self.token_ids) == self.stop_after else None

    def on_tokens(self, token_ids: list[int], ending: bool) -> None:
        assert self.finish is None, "tokens after the end"
        assert token_ids, "nothing to hand over"
        self.token_ids += token_ids

    def on_finish(self, finish: Finish, times: RequestTimes) -> None:
        assert self.finish is None, "ended twice"
        self.finish = finish


@dataclass
class Rig:
    """A loop over a fake executor, with its parts at hand."""

    executor: FakeExecutor
    loop: EngineLoop
    records: list[StepRecord]
    sinks: dict[str, RecordingSink] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def add(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> RecordingSink:
        request_id = f"r{len(self.requests)}"
        sink = RecordingSink(stop_after=options.pop("stop_after", None))
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            params=SamplingParams(temperature=0, max_tokens=None, **options.pop("params", {})),
            max_tokens=max_tokens,
            sink=sink,
            times=RequestTimes(arrival=0.0),
            eos_token_ids=options.pop("eos", frozenset({EOS})),
            **options,
        )
        self.sinks[request_id], self.requests[request_id] = sink, request
        self.loop.add(request)
        return sink

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.loop.step():
                break
            self.check_pages()
        assert not self.loop.has_work, "requests never end"
        self.check_idle()

    def check_pages(self) -> None:
        """No page leaked, or free while a submitted step may use it; what is promised can be had."""
        kv, capacity = self.loop.kv_cache, self.loop.capacity
        check_cache(kv)
        held = {page for page in range(kv.num_pages) if kv.pool.references(page)}
        assert self.executor.unread_pages() <= held, "a page was freed before its step ran"
        if not capacity.may_pause:
            assert kv.uncommitted_pages(capacity.committed_pages) >= 0, "a promise is broken"

    def check_idle(self) -> None:
        assert self.loop.kv_cache.pool.num_free == self.executor.num_pages
        assert self.loop.capacity.committed_pages == 0
        assert self.loop.capacity.num_free_slots == self.executor.limits.max_batch_size


def make_rig(
    *,
    num_pages: int = 32,
    tokens_per_page: int = 4,
    max_batch_size: int = 4,
    max_num_tokens: int = 16,
    max_seq_len: int = 64,
    chunk_tokens: int | None = None,
    capacity_policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
    chunking_policy: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED,
    overlap: bool = True,
    observer: Observer | None = None,
    host_pages: int = 0,
    cache_options: PrefixCacheOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
    hash_of: PageHash = page_hash,
    **executor_options: Any,
) -> Rig:
    limits = Limits(max_batch_size, max_num_tokens, max_seq_len, tokens_per_page)
    executor = FakeExecutor(limits, num_pages, host_pages=host_pages, **executor_options)
    records: list[StepRecord] = []
    loop = EngineLoop(
        executor,
        KvCache(
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            num_slots=max_batch_size,
            max_seq_len=max_seq_len,
            options=cache_options,
            host_pages=host_pages,
            clock=clock,
            hash_of=hash_of,
        ),
        CapacityScheduler(
            num_pages=num_pages,
            tokens_per_page=tokens_per_page,
            max_batch_size=max_batch_size,
            policy=capacity_policy,
        ),
        MicroBatchScheduler(
            max_num_tokens=max_num_tokens,
            chunk_tokens=chunk_tokens,
            tokens_per_page=tokens_per_page,
            policy=chunking_policy,
        ),
        overlap=overlap,
        on_step=records.append,
        observer=observer,
    )
    return Rig(executor, loop, records)


@pytest.fixture(scope="session")
def fakes() -> types.SimpleNamespace:
    """`make_rig`, `FakeExecutor`, `expected_ids`, `hashed_next_id` and the fake's constants."""
    return types.SimpleNamespace(
        make_rig=make_rig,
        FakeExecutor=FakeExecutor,
        expected_ids=expected_ids,
        hashed_next_id=hashed_next_id,
        rarely_ending_id=rarely_ending_id,
        VOCAB=VOCAB,
        EOS=EOS,
    )
