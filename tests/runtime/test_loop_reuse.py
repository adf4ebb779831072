"""The loop with prefix reuse over a fake executor: tokens, failures, and pages throughout."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.runtime.kv_cache import CacheUser, CopyKind, PrefixCacheOptions, RequestCache, radix_tree
from tapeout.runtime.scheduler.policies import CapacityPolicy
from tapeout.runtime.scheduler.request import FinishReason


class CollidingKey(bytes):
    """Token ids whose hashes are all equal."""

    def __hash__(self) -> int:
        return 7


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), host_pages=st.integers(0, 12), collide=st.booleans(), reuse=st.booleans())
def test_any_life_gives_the_ids_a_request_gets_alone(
    fakes: SimpleNamespace, seed: int, host_pages: int, collide: bool, reuse: bool
) -> None:
    """Arrivals, shared prefixes, cancellations, failing steps and copies, clears, in every mix."""
    choose = random.Random(seed)
    radix_tree.PageKey = CollidingKey if collide else bytes
    per_page = choose.randint(1, 4)
    rig = fakes.make_rig(
        num_pages=choose.randint(-(-24 // per_page), 60 // per_page + 2), tokens_per_page=per_page,
        max_batch_size=choose.randint(1, 5), max_num_tokens=choose.randint(1, 16), max_seq_len=24,
        chunk_tokens=choose.choice([None, 3]), capacity_policy=choose.choice(list(CapacityPolicy)),
        host_pages=host_pages if reuse else 0,
        cache_options=PrefixCacheOptions(enable_prefix_reuse=reuse),
        hash_of=(lambda key, parent: 7) if collide else radix_tree.page_hash,
        nan_when=lambda tokens: tokens[0] == 13 and len(tokens) % 5 == 0,
    )  # fmt: skip
    try:
        _live(rig, fakes, choose)
    finally:
        radix_tree.PageKey = bytes


def _live(rig: Any, fakes: SimpleNamespace, choose: random.Random) -> None:
    stems = [[choose.randint(1, 3) for _ in range(9)] for _ in range(2)] + [[13, 1, 2, 1, 2]]
    asked: list[tuple[list[int], int]] = []
    for _ in range(60):
        if choose.random() < 0.4:
            stem = choose.choice(stems)
            prompt = stem[: choose.randint(1, 9)] + [
                choose.randint(1, 3) for _ in range(choose.randint(0, 3))
            ]
            salt = choose.choice([None, None, "other"])
            if asked and choose.random() < 0.4:  # a conversation goes on
                index = choose.randrange(len(asked))
                prompt = (asked[index][0] + rig.sinks[f"r{index}"].token_ids)[:12]
            asked.append((prompt, choose.randint(1, 12)))
            cache = RequestCache(CacheUser(salt=salt))
            rig.add(*asked[-1], eos=frozenset(), watched=choose.random() < 0.5, cache=cache)
        rare = choose.random()
        if rare < 0.05:
            which = choose.choice(["fail_steps", "refuse_steps"])
            setattr(rig.executor, which, getattr(rig.executor, which) | {len(rig.executor.steps)})
        elif rare < 0.08:
            rig.executor.fail_copies = True
        elif rare < 0.12:
            rig.loop.kv_cache.clear(salt=choose.choice([None, "other"]))
        elif rare < 0.2 and asked:
            rig.loop.abort(f"r{choose.randrange(len(asked))}")
        rig.loop.step()
        rig.executor.fail_copies = False
        rig.check_pages()
    rig.run()
    for index, (prompt, max_tokens) in enumerate(asked):
        sink, expected = rig.sinks[f"r{index}"], fakes.expected_ids(prompt, max_tokens, eos=-1)
        assert sink.token_ids == expected[: len(sink.token_ids)]
        if sink.finish.reason is FinishReason.ERROR:
            assert "scripted" in sink.finish.stop_reason or prompt[0] == 13
        elif sink.finish.reason is not FinishReason.ABORT:
            assert sink.token_ids == expected


def run_one(rig: Any, prompt: list[int], max_tokens: int = 4, **options: Any) -> tuple[Any, int]:
    sink = rig.add(prompt, max_tokens, eos=frozenset(), **options)
    rig.run()
    return sink, list(rig.requests.values())[-1].cache.cached_tokens


def test_a_prompt_is_found_again_and_its_last_token_is_computed(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()  # pages of 4
    prompt = list(range(1, 13))
    first, cached = run_one(rig, prompt)
    assert cached == 0
    again, cached = run_one(rig, prompt)
    assert cached == 11  # two pages, and the third copied up to the last token
    assert again.token_ids == first.token_ids == fakes.expected_ids(prompt, 4, eos=-1)
    assert rig.executor.steps[-4].kv_lens.tolist() == [12]
    assert len(rig.executor.steps[-4].token_ids) == 1


def test_generated_tokens_are_found_again(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    first, _ = run_one(rig, [1, 2, 3], 10)
    sink, cached = run_one(rig, [1, 2, 3, *first.token_ids, 5], 4)
    # Ten tokens were generated, and the last of them never became input: 12 tokens, three full pages.
    assert cached == 12
    assert sink.token_ids == fakes.expected_ids([1, 2, 3, *first.token_ids, 5], 4, eos=-1)


def test_a_running_request_shares_its_prompt(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=10)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    long = rig.add([*prompt, 9], 15, eos=frozenset())  # worst case 6 pages
    for _ in range(3):
        rig.loop.step()
    short = rig.add([*prompt, 10], 15, eos=frozenset())  # 6 pages as well, but 2 of them are there
    rig.loop.step()
    assert rig.requests["r1"].cache.cached_tokens == 8
    assert rig.records[-1].admitted[0].reason() == (
        "admitted: worst case 4 of 4 pages uncommitted; 8 tokens are cached"
    )
    assert rig.loop.stats().num_requests_running == 2
    assert {int(p) for p in rig.loop.kv_cache.tables[rig.requests["r0"].slot, :2]} == {
        int(p) for p in rig.loop.kv_cache.tables[rig.requests["r1"].slot, :2]
    }
    rig.run()
    assert long.token_ids == fakes.expected_ids([*prompt, 9], 15, eos=-1)
    assert short.token_ids == fakes.expected_ids([*prompt, 10], 15, eos=-1)


def test_a_waiting_request_is_admitted_once_a_running_one_shares_its_prompt(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=10)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    rig.add([*prompt, 9], 15, eos=frozenset())  # worst case 6 pages
    rig.add([*prompt, 10], 15, eos=frozenset())  # too many, before two of them are there
    for _ in range(3):
        rig.loop.step()
    assert [record.held and record.held.reason() for record in rig.records] == [
        "waiting: worst case 6 pages, 4 uncommitted",
        "waiting: worst case 6 pages, 4 uncommitted",  # nobody has read the first token yet
        None,
    ]
    assert rig.requests["r1"].cache.cached_tokens == 8
    rig.run()
    for name, last in (("r0", 9), ("r1", 10)):
        assert rig.sinks[name].token_ids == fakes.expected_ids([*prompt, last], 15, eos=-1)


# ---- pausing ------------------------------------------------------------------------------

PRESSED = {
    "num_pages": 12,
    "tokens_per_page": 2,
    "max_seq_len": 24,
    "capacity_policy": CapacityPolicy.MAX_UTILIZATION,
    "overlap": False,
}


@pytest.mark.parametrize("host_pages", [0, 24])
def test_a_paused_request_goes_on_with_what_is_still_cached(fakes: SimpleNamespace, host_pages: int) -> None:
    rig = fakes.make_rig(**PRESSED, host_pages=host_pages)
    prompts = [[i + 1] * 4 for i in range(4)]
    sinks = [rig.add(prompt, 12, eos=frozenset()) for prompt in prompts]
    rig.run()
    assert [s.token_ids for s in sinks] == [fakes.expected_ids(p, 12, eos=-1) for p in prompts]
    resumed = [a for r in rig.records for a in r.admitted if a.resumed]
    assert resumed
    assert any(a.cached_tokens for a in resumed)
    starts = {s.request_id: s.start for r in rig.records for s in r.plan.context}
    assert any(starts.values()), "context begins behind what was found"
    stats = rig.loop.stats()
    assert stats.recomputed_tokens == sum(a.recompute_tokens for a in resumed)
    assert stats.prompt_tokens == 4 * 4 + stats.recomputed_tokens + len(resumed)
    if host_pages:  # nothing is lost; all but the page that was not full is found again
        assert all(a.recompute_tokens < 2 for a in resumed)
    assert all(r.cache.cached_tokens == 0 for r in rig.requests.values()), "its own pages are no hit"


def test_nothing_is_cached_of_a_resumed_request_before_it_was_computed_again(fakes: SimpleNamespace) -> None:
    """It has output already when it is aborted amid its context."""
    rig = fakes.make_rig(**PRESSED, chunk_tokens=2)
    for i in range(4):
        rig.add([i + 1] * 4, 12, eos=frozenset())
    while not (resumed := [a.request_id for r in rig.records for a in r.admitted if a.resumed]):
        rig.loop.step()
    request = rig.requests[resumed[0]]
    running = rig.loop.running
    ids = request.context_token_ids.tolist()
    assert running.output_tokens[request.slot] > 0
    assert running.cached_tokens[request.slot] < len(ids) - 2, "it still reads context"
    computed = int(running.cached_tokens[request.slot])
    rig.loop.abort(resumed[0])
    rig.run()
    sink, cached = run_one(rig, ids)
    assert cached <= computed
    assert sink.token_ids == fakes.expected_ids(ids, 4, eos=-1)


@pytest.mark.parametrize("first", [2, 4, 6, 9])
@pytest.mark.parametrize("others", [2, 3])
def test_pages_that_others_share_do_not_count_as_coming_back(
    fakes: SimpleNamespace, first: int, others: int
) -> None:
    """Pausing one of several that share a prompt gives back its own pages only."""
    rig = fakes.make_rig(**PRESSED | {"num_pages": 14})
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    run_one(rig, shared)
    prompts = [[9] * first, *([*shared, i] for i in range(others))]
    sinks = [rig.add(prompt, 20 - len(prompt), eos=frozenset()) for prompt in prompts]
    kv, make_room, told = rig.loop.kv_cache, rig.loop._make_room, []

    def checked(plan: Any, lacking: Any) -> Any:
        free = kv.num_free
        short = lacking.total - free
        fitted = make_room(plan, lacking)
        pauses = rig.loop._decisions.paused
        told.append(len(pauses))
        # Without overlap they come back at once: as many as were told, and no more are paused than it takes.
        assert kv.num_free - free == sum(pause.pages for pause in pauses)
        assert kv.num_free - free - pauses[-1].pages < short
        return fitted

    rig.loop._make_room = checked
    rig.run()
    assert sum(told)
    expected = [fakes.expected_ids(prompt, 20 - len(prompt), eos=-1) for prompt in prompts]
    assert [s.token_ids for s in sinks] == expected


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_cached_pages_are_there_for_every_policy(fakes: SimpleNamespace, policy: CapacityPolicy) -> None:
    rig = fakes.make_rig(capacity_policy=policy, num_pages=6, max_seq_len=24)
    for i in range(1, 5):  # idle pages of others are evicted for the next
        prompt = [i] * 9
        assert run_one(rig, prompt)[1] == 0
        again, cached = run_one(rig, prompt)
        assert cached == 8
        assert again.token_ids == fakes.expected_ids(prompt, 4, eos=-1)


def test_salts_do_not_share(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig()
    prompt = list(range(1, 10))
    for salt, expected in ((None, 0), ("a", 0), ("b", 0), ("a", 8), (None, 8)):
        assert run_one(rig, prompt, cache=RequestCache(CacheUser(salt=salt)))[1] == expected


@pytest.mark.parametrize("how", ["fail_steps", "refuse_steps", "nan"])
def test_nothing_of_a_failed_request_is_cached(fakes: SimpleNamespace, how: str) -> None:
    """Not even what its earlier steps computed soundly."""
    prompt = list(range(1, 9))
    options: dict[str, Any] = {how: frozenset({6})} if how != "nan" else {"nan_when": lambda t: len(t) == 13}
    rig = fakes.make_rig(**options)
    failed, _ = run_one(rig, prompt, 12)
    assert failed.finish.reason is FinishReason.ERROR
    assert len(failed.token_ids) >= 5
    stats = rig.loop.kv_cache.stats()
    assert (stats.device_pages, stats.host_pages) == (0, 0)
    rig.executor.nan_when = lambda tokens: False
    sink, cached = run_one(rig, prompt, 12)
    assert cached == 0
    assert sink.token_ids == fakes.expected_ids(prompt, 12, eos=-1)


def test_what_a_failed_request_shared_stays_for_the_others(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(nan_when=lambda tokens: tokens[8:10] == [9, 9])
    prompt = list(range(1, 9))
    assert run_one(rig, [*prompt, 1])[1] == 0
    failed, cached = run_one(rig, [*prompt, 9, 9])
    assert (failed.finish.reason, cached) == (FinishReason.ERROR, 8)
    assert run_one(rig, [*prompt, 2])[1] == 8


def test_pages_go_to_the_host_and_come_back(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=6, host_pages=8)
    prompts = [[i] * 9 for i in range(1, 5)]
    for prompt in prompts:
        run_one(rig, prompt)
    for prompt in prompts:
        sink, cached = run_one(rig, prompt)
        assert cached == 8
        assert sink.token_ids == fakes.expected_ids(prompt, 4, eos=-1)
    stats, kinds = rig.loop.kv_cache.stats(), {c.kind for c in rig.executor.copies}
    assert kinds >= {CopyKind.OFFLOAD, CopyKind.ONBOARD}
    assert stats.onboarded_pages >= 6
    assert stats.offloaded_pages == stats.evicted_pages > 6


@pytest.mark.parametrize("host_pages", [0, 3])
def test_evictions_are_told_with_whose_pages_and_for_whom(fakes: SimpleNamespace, host_pages: int) -> None:
    rig = fakes.make_rig(num_pages=8, host_pages=host_pages)
    for i in range(1, 3):
        run_one(rig, [i] * 9, 3)  # each leaves two full pages
    assert not any(r.evicted for r in rig.records)
    first = len(rig.records)
    rig.add([3] * 15, 9, eos=frozenset())  # 4 pages, as many as are blank; then two more
    rig.add([4] * 3, 2, eos=frozenset())
    rig.run()
    told = [(e, r.plan.step) for r in rig.records[first:] for e in r.evicted]
    assert [e.request_id for e, _ in told][:2] == ["r0", "r0"], "the oldest, whole"
    assert all(set(e.made_room_for) <= {"r2", "r3"} and e.made_room_for for e, _ in told)
    assert all(e.to_host == (e.pages if host_pages else 0) for e, _ in told)
    assert sum(e.pages for e, _ in told) == rig.loop.kv_cache.stats().evicted_pages
    lines = [line for record in rig.records[first:] for line in record.explain() if "evicted" in line]
    where = " of it, 1 of them to the host," if host_pages else " of it"
    assert lines == [f"{one}: evicted: 1 cached pages{where} made room for {other}" for one, other in
                     (("r0", "r3"), ("r0", "r2"), ("r1", "r2"))]  # fmt: skip


def test_copies_that_fail_fail_their_requests_and_empty_the_cache(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(num_pages=12, host_pages=8)
    run_one(rig, list(range(1, 10)))
    other = rig.add([20, 21], 12, eos=frozenset())
    rig.loop.step()
    rig.executor.fail_copies = True
    failed = rig.add([*range(1, 7), 20], 4, eos=frozenset())  # wants a copy of the second page
    rig.loop.step()
    rig.executor.fail_copies = False
    rig.run()
    assert "scripted failure of copies" in failed.finish.stop_reason
    assert "scripted failure of copies" in other.finish.stop_reason
    assert rig.loop.kv_cache.stats().device_pages == 0
    sink, cached = run_one(rig, list(range(1, 10)))
    assert cached == 0
    assert sink.token_ids == fakes.expected_ids(list(range(1, 10)), 4, eos=-1)


def test_without_reuse_nothing_is_kept(fakes: SimpleNamespace) -> None:
    rig = fakes.make_rig(cache_options=PrefixCacheOptions(enable_prefix_reuse=False))
    for _ in range(2):
        assert run_one(rig, list(range(1, 10)))[1] == 0
    assert rig.loop.kv_cache.stats().device_pages == 0
    assert rig.executor.copies == []


@pytest.mark.parametrize("running", [8, 9, 20])
def test_contexts_of_few_and_of_many_are_stored_before_an_admission(
    fakes: SimpleNamespace, running: int
) -> None:
    rig = fakes.make_rig(num_pages=100, max_batch_size=running + 1, max_num_tokens=200)
    prompts = [[1 + i % 20, 2 + i // 20, 3, 4, 5] for i in range(running)]
    for prompt in prompts:
        rig.add(prompt, 9, eos=frozenset())
    for _ in range(2):
        rig.loop.step()  # their first tokens have been read
    assert rig.loop.kv_cache.stats().stored_pages == 0
    assert rig.loop.kv_cache.unstored_slots().tolist() == list(range(running))
    rig.add(prompts[-1], 9, eos=frozenset())
    rig.loop.step()
    assert rig.loop.kv_cache.stats().stored_pages == running
    assert rig.loop.kv_cache.unstored_slots().tolist() == [running], "the one that has just come"
    assert rig.requests[f"r{running}"].cache.cached_tokens == 4
    rig.run()
    assert not rig.loop.kv_cache.any_unstored


def test_a_waiting_request_is_searched_for_once(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fakes.make_rig(num_pages=8)
    rig.add([1] * 8, 20, eos=frozenset())
    for _ in range(2):
        rig.loop.step()  # its first token is there: from now on it stores nothing before it ends
    searches = 0
    find = radix_tree.RadixTree.find

    def counted(*args: Any) -> Any:
        nonlocal searches
        searches += 1
        return find(*args)

    monkeypatch.setattr(radix_tree.RadixTree, "find", counted)
    waiting = rig.add([2] * 8, 20, eos=frozenset())
    for _ in range(12):
        rig.loop.step()
    assert waiting.token_ids == []
    assert searches == 1
    rig.run()
    assert waiting.token_ids == fakes.expected_ids([2] * 8, 20, eos=-1)
