"""The cache manager as a state machine over a memory that knows what every place should hold.

Every place of a page holds the namespace and all ids up to it, which is what a model's K and V depend on.
Steps write when they are read, as late as they may; copies are carried out at once, before steps that
were queued earlier. Whatever is served must be what the request itself would have computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cache_checks import check_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tapeout.plugins.errors import UsageError
from tapeout.runtime.kv_cache import (
    CacheUser,
    CopyKind,
    KvCache,
    KvCacheRetentionConfig,
    PinnedPrefix,
    PrefixCacheOptions,
    TokenRangeRetentionConfig,
    pages_for,
    radix_tree,
)

PER_PAGE, SLOTS, MAX_SEQ = 2, 4, 14
SALTS = st.sampled_from([None, None, "a"])
#: Two ids and few patterns, so that prefixes are shared all the time.
PROMPTS = st.builds(
    lambda pattern, length: [(pattern >> (i % 6)) & 1 for i in range(length)],
    st.sampled_from([0b0, 0b1, 0b100, 0b10000, 0b111111]),
    st.integers(1, 9),
)
REQUESTS = st.tuples(
    PROMPTS,
    st.integers(1, 5),  # max_tokens
    SALTS,
    st.none() | st.tuples(st.integers(0, 100), st.none() | st.integers(1, 5000)),  # priority, ms
)
SEEDS = st.integers(0, 2**16)
POISON = "written by a step that failed"


class CollidingKey(bytes):
    """Token ids whose hashes are all equal."""

    def __hash__(self) -> int:
        return 7


@dataclass
class Live:
    """A request that holds a slot; `cached` counts what its submitted steps will have computed."""

    prompt: list[int]
    max_tokens: int
    namespace: tuple[Any, ...]
    worst_pages: int
    cached: int
    output: list[int] = field(default_factory=list)
    planned: int = 0
    last_step: int = -1
    ended: bool = False
    failed: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class Step:
    number: int
    rows: list[tuple[int, int, int, list[int]]]  # slot, start, end, pages
    fails: bool


class ContentsMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(7, 12),
        host_pages=st.integers(0, 5),
        partial=st.booleans(),
        collide=st.booleans(),
        events=st.booleans(),
    )
    def begin(self, num_pages: int, host_pages: int, partial: bool, collide: bool, events: bool) -> None:
        radix_tree.PageKey = CollidingKey if collide else bytes
        self.now = 0.0
        options = PrefixCacheOptions(
            enable_partial_reuse=partial, event_buffer_max_size=1000 if events else 0
        )
        self.kv = KvCache(
            num_pages=num_pages, tokens_per_page=PER_PAGE, num_slots=SLOTS, max_seq_len=MAX_SEQ,
            options=options, host_pages=host_pages, weights="w0", clock=lambda: self.now,
            hash_of=(lambda key, parent: 7) if collide else radix_tree.page_hash,
        )  # fmt: skip
        self.device: list[list[Any]] = [[None] * PER_PAGE for _ in range(num_pages)]
        self.host: list[list[Any]] = [[None] * PER_PAGE for _ in range(host_pages)]
        self.live: dict[int, Live] = {}
        self.steps: list[Step] = []
        self.pins: list[PinnedPrefix] = []
        self.weights, self.next_step, self.last_read = "w0", 0, -1

    def teardown(self) -> None:
        radix_tree.PageKey = bytes

    # ---- requests ---------------------------------------------------------------------------

    @property
    def promised(self) -> int:
        return sum(r.worst_pages for r in self.live.values())

    @rule(requests=st.lists(REQUESTS, max_size=2), turns=st.integers(1, 6), seed=SEEDS)
    def arrive_and_run(self, requests: list[tuple[Any, ...]], turns: int, seed: int) -> None:
        """Hypothesis leaves whole rules out of an example; what belongs to every life is one rule."""
        for request in requests:
            self.arrive(*request)
        self.turns(turns, seed, fails=False)

    def arrive(
        self, prompt: list[int], max_tokens: int, salt: str | None, retention: tuple[int, int | None] | None
    ) -> None:
        slot = next((s for s in range(SLOTS) if s not in self.live), None)
        worst = pages_for(len(prompt) + max_tokens, PER_PAGE)
        if slot is None or worst > self.kv.num_pages:
            return
        config = None
        if retention is not None:
            part = TokenRangeRetentionConfig(0, None, *retention)
            config = KvCacheRetentionConfig([part], 100 - retention[0], retention[1])
        user, ids = CacheUser(salt=salt, retention=config), np.array(prompt, np.int32)
        asked = self.kv.ask(ids, user, worst, self.kv.uncommitted_pages(self.promised))
        assert self.kv.ask(ids, user, worst, self.kv.uncommitted_pages(self.promised)) == asked
        if not asked.fits:
            return
        stats = self.kv.attach(slot, ids, user, asked.match)
        assert stats.cached_tokens < len(prompt), "the last token is always computed"
        assert stats.cached_tokens == stats.hit_pages * PER_PAGE + stats.cached_tokens % PER_PAGE
        self.live[slot] = Live(
            prompt, max_tokens, (self.weights, None, salt), worst, cached=stats.cached_tokens
        )
        self.copy()
        self.check_served(slot, self.kv.pages_of(slot), stats.cached_tokens)

    @precondition(lambda self: any(not r.ended for r in self.live.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s, r in self.live.items() if not r.ended]))
        self.live[slot].ended = True
        self.release_ended()

    def release_ended(self) -> None:
        for slot, request in list(self.live.items()):
            if request.ended and request.last_step <= self.last_read:
                if not request.failed and request.output:
                    self.store(slot)
                self.kv.free(slot, failed=request.failed)
                del self.live[slot]

    def store(self, slot: int) -> None:
        request = self.live[slot]
        ids = np.array(request.ids, np.int32)
        self.kv.store(slot, len(ids) - 1, lambda start, end: ids[start:end], request.last_step)

    # ---- steps ------------------------------------------------------------------------------

    @precondition(lambda self: self.live or self.steps)
    @rule(turns=st.integers(1, 4), seed=SEEDS)
    def fail_a_step(self, turns: int, seed: int) -> None:
        self.turns(turns, seed, fails=True)

    def turns(self, turns: int, seed: int, *, fails: bool) -> None:
        """As the loop makes them: the next step is submitted before one is read."""
        choose = random.Random(seed)
        for turn in range(turns):
            if len(self.steps) < 2:
                self.submit(choose, fails and turn == 0)
            if len(self.steps) == 2 or (self.steps and choose.random() < 0.5):
                self.read()

    def submit(self, choose: random.Random, fails: bool) -> None:
        ready = [
            s
            for s, r in self.live.items()
            if not r.ended and (r.cached < len(r.prompt) or r.planned < r.max_tokens)
        ]
        chosen = [s for s in ready if choose.random() < 0.8]
        rows = []
        for slot in chosen:
            request = self.live[slot]
            rest = len(request.prompt) - request.cached
            count = choose.choice([1, rest, rest]) if rest > 0 else 1
            rows.append((slot, request.cached, request.cached + count))
        if not rows:
            return
        self.kv.grow(np.array([r[0] for r in rows]), np.array([r[2] for r in rows]))
        self.copy()
        for slot, _, end in rows:
            request = self.live[slot]
            request.cached, request.last_step = end, self.next_step
            request.planned += end >= len(request.prompt)
        self.steps.append(Step(self.next_step, [(*row, self.kv.pages_of(row[0])) for row in rows], fails))
        self.next_step += 1

    def read(self) -> None:
        step = self.steps.pop(0)
        for slot, start, end, pages in step.rows:
            request = self.live[slot]
            self.check_served(slot, pages, start if not request.failed else 0)
            for position in range(start, end):
                # An id the host has not read yet is the one that this very model gives.
                ids = request.prompt + [self.output_id(request, i) for i in range(end - len(request.prompt))]
                value = POISON if step.fails else (request.namespace, tuple(ids[: position + 1]))
                self.device[pages[position // PER_PAGE]][position % PER_PAGE] = value
            if step.fails:
                request.ended = request.failed = True
            elif end >= len(request.prompt) and not request.ended:
                request.output.append(self.output_id(request, len(request.output)))
                request.ended = len(request.output) == request.max_tokens
        self.last_read = step.number
        self.kv.step_read(step.number)
        self.release_ended()

    def output_id(self, request: Live, index: int) -> int:
        """The ids a request's model gives: few, so that outputs are prefixes of others' prompts."""
        return (sum(request.prompt) + index) % 2

    @rule()
    def look(self) -> None:
        """Somebody looks: what has become full is left to the cache."""
        sound = {s for s, r in self.live.items() if r.output and not r.ended}
        ready = [s for s in self.kv.unstored_slots().tolist() if s in sound]
        num_tokens = [len(self.live[s].ids) - 1 for s in ready]
        for slot in self.kv.slots_to_store(np.array(ready, np.int64), np.array(num_tokens, np.int32)):
            path = self.kv._slots[slot].path
            before = len(path)
            self.store(slot)
            assert len(path) > before or not self.kv._slots[slot].may_store, "nobody is named in vain"
        assert not set(ready) & set(self.kv.unstored_slots().tolist()), "nobody is looked at twice"

    # ---- the rest of the world --------------------------------------------------------------

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(what=st.sampled_from([None] * 9 + ["a", "all", "weights"]))
    def clear(self, what: str | None) -> None:
        """Now and then: it would leave nothing to look at otherwise."""
        if what == "weights":
            self.weights = f"w{int(self.weights[1:]) + 1}"
            self.kv.set_weights(self.weights)
        elif what is not None:
            self.kv.clear(salt=None if what == "all" else what)
        if what in ("all", "weights"):
            assert self.kv.stats().device_pages == self.kv.stats().host_pages == 0

    @rule(prompt=PROMPTS, salt=SALTS)
    def pin(self, prompt: list[int], salt: str | None) -> None:
        try:
            available = self.kv.uncommitted_pages(self.promised)
            pin = self.kv.pin(np.array(prompt, np.int32), CacheUser(salt=salt), available)
        except UsageError:
            return
        self.copy()
        self.pins.append(pin)
        for i, page in enumerate(pin.pages):
            ends = range(i * PER_PAGE + 1, (i + 1) * PER_PAGE + 1)
            assert self.device[page] == [((self.weights, None, salt), tuple(prompt[:end])) for end in ends]

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.kv.unpin(self.pins.pop())

    # ---- what is checked --------------------------------------------------------------------

    def copy(self) -> None:
        pools = {
            CopyKind.WITHIN: (self.device, self.device),
            CopyKind.OFFLOAD: (self.device, self.host),
            CopyKind.ONBOARD: (self.host, self.device),
        }
        unread = {page for step in self.steps for *_, pages in step.rows for page in pages}
        for kind, source, target in self.kv.take_copies():
            origin, goal = pools[kind]
            assert kind is CopyKind.OFFLOAD or target not in unread
            goal[target] = list(origin[source])

    def check_served(self, slot: int, pages: list[int], count: int) -> None:
        """The first `count` places of a request hold what it would have computed itself."""
        request = self.live[slot]
        ids = request.prompt + [self.output_id(request, i) for i in range(count)]
        for position in range(count):
            found = self.device[pages[position // PER_PAGE]][position % PER_PAGE]
            assert found == (request.namespace, tuple(ids[: position + 1]))

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.copy()
        check_cache(self.kv)
        assert self.kv.uncommitted_pages(self.promised) >= 0, "a promise is broken"
        held = {p for p in range(self.kv.num_pages) if self.kv.pool.references(p)}
        assert {p for step in self.steps for *_, pages in step.rows for p in pages} <= held

    @invariant()
    def cached_pages_hold_what_they_say(self) -> None:
        if not hasattr(self, "kv"):
            return
        tree = self.kv._cache.tree
        for namespace, root in tree._roots.items():
            todo = [(root, ())]
            for node, ids in todo:
                ids = (*ids, *node.token_ids) if node is not root else ()
                todo += [(child, ids) for child in node.children.values()]
                if node is root:
                    continue
                cells = self.device[node.page] if node.on_device else self.host[node.host_page]
                start = len(ids) - PER_PAGE
                assert cells == [(tuple(namespace), ids[: start + k + 1]) for k in range(PER_PAGE)]
        assert all(namespace.weights == self.weights for namespace in tree._roots)


TestContents = ContentsMachine.TestCase
TestContents.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(24))
def test_a_long_life(seed: int) -> None:
    """The same without Hypothesis, whose examples are short: hundreds of requests in one cache."""
    choose = random.Random(seed)
    machine = ContentsMachine()
    machine.begin(
        choose.randint(7, 12), seed % 6, choose.random() < 0.8, seed % 2 == 0, choose.random() < 0.5
    )

    def prompt() -> list[int]:
        pattern = choose.choice([0b0, 0b1, 0b100, 0b10000, 0b111111])
        return [(pattern >> (i % 6)) & 1 for i in range(choose.randint(1, 9))]

    def salt() -> str | None:
        return choose.choice([None, None, "a"])

    for _ in range(300):
        rare = choose.random()
        for _ in range(choose.randint(0, 2)):
            retention = (choose.randint(0, 100), choose.choice([None, 500, 3000]))
            machine.arrive(prompt(), choose.randint(1, 5), salt(), choose.choice([None, retention]))
        machine.turns(choose.randint(1, 4), choose.randint(0, 2**16), fails=rare < 0.05)
        if rare > 0.97:
            machine.clear(choose.choice(["a", "all", "weights"]))
        elif rare > 0.9:
            machine.pin(prompt(), salt())
        elif rare > 0.8 and machine.pins:
            machine.unpin()
        elif rare > 0.7:
            machine.look()
        elif rare > 0.6:
            machine.wait(choose.random() * 4)
        elif rare > 0.55 and (running := [s for s, r in machine.live.items() if not r.ended]):
            machine.live[choose.choice(running)].ended = True
            machine.release_ended()
        machine.all_is_well()
        machine.cached_pages_hold_what_they_say()
    stats = machine.kv.stats()
    assert min(stats.hit_pages, stats.stored_pages, stats.evicted_pages, stats.removed_pages) > 0
    assert bool(stats.offloaded_pages) == bool(stats.onboarded_pages) == bool(machine.host)


@pytest.fixture(autouse=True)
def _bytes_again() -> Any:
    yield
    radix_tree.PageKey = bytes
