"""Chunking policies: who gets how much of a step, and where chunks end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.runtime.scheduler.chunking import Chunking
from tapeout.runtime.scheduler.policies import ChunkingPolicy

FCFS, EQUAL, FORCE = ChunkingPolicy
UNLIMITED = np.iinfo(np.int32).max


def sizes_of(
    policy: ChunkingPolicy,
    rest: list[int],
    budget: int,
    *,
    limit: int = UNLIMITED,
    page: int = 4,
    starts: list[int] | None = None,
    last_step: list[int] | None = None,
) -> list[int]:
    sizes, _ = Chunking(policy, limit, page).sizes(
        np.array(starts or [0] * len(rest), np.int32),
        np.array(rest, np.int32),
        lambda: np.array(last_step or [-1] * len(rest), np.int64),
        budget,
    )
    assert sizes.dtype == np.int32
    result: list[int] = sizes.tolist()
    return result


@pytest.mark.parametrize(
    ("policy", "rest", "budget", "options", "expected"),
    [
        # First come, first served: the one at the border is cut at a page, and nobody comes after it.
        (FCFS, [10, 10, 2], 40, {}, [10, 10, 2]),
        (FCFS, [10, 10, 2], 17, {}, [10, 4, 0]),
        (FCFS, [10, 10, 2], 13, {}, [10, 0, 0]),
        (FCFS, [10, 10], 3, {}, [3, 0]),  # less than a page for the first
        (FCFS, [30, 10], 40, {"limit": 9}, [8, 8]),  # a limit is cut at a page, too
        (FCFS, [30, 10], 40, {"limit": 3}, [3, 3]),  # but not to nothing
        (FCFS, [30], 7, {"starts": [3]}, [5]),  # to the end of the page at 8
        (FCFS, [30], 2, {"starts": [1]}, [2]),
        # Equal progress: the same number of pages for all, the rest page by page in order.
        (EQUAL, [40, 40, 40], 24, {}, [8, 8, 8]),
        (EQUAL, [40, 40, 40], 33, {}, [12, 12, 8]),
        (EQUAL, [40, 5, 40], 29, {}, [12, 5, 12]),  # what one does not need the others get
        (EQUAL, [40, 40, 40], 9, {}, [4, 4, 0]),
        (EQUAL, [40, 40, 40], 9, {"last_step": [7, 6, 5]}, [0, 4, 4]),  # who waited longest
        (EQUAL, [40, 40], 3, {"last_step": [7, 6]}, [0, 3]),
        (EQUAL, [40, 40], 40, {"limit": 8}, [8, 8]),
        # Forced chunks: whole or none.
        (FORCE, [40, 5, 40], 40, {"limit": 8}, [8, 5, 8]),
        (FORCE, [40, 40, 2], 15, {"limit": 8}, [8, 0, 0]),
        (FORCE, [40, 2], 6, {"limit": 8}, [4, 0]),  # the first runs all the same
        (FORCE, [2, 40], 6, {"limit": 8}, [2, 0]),
    ],
)
def test_shares(
    policy: ChunkingPolicy, rest: list[int], budget: int, options: dict[str, int], expected: list[int]
) -> None:
    assert sizes_of(policy, rest, budget, **options) == expected  # type: ignore[arg-type]


@given(
    policy=st.sampled_from(ChunkingPolicy),
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(-1, 30)), min_size=1, max_size=12
    ),
    budget=st.integers(1, 100),
    limit=st.integers(1, 30) | st.just(UNLIMITED),
    page=st.integers(1, 9),
)
def test_any_share_keeps_the_rules(
    policy: ChunkingPolicy, requests: list[tuple[int, int, int]], budget: int, limit: int, page: int
) -> None:
    starts, rest, last_step = (list(column) for column in zip(*requests, strict=True))
    sizes = sizes_of(policy, rest, budget, limit=limit, page=page, starts=starts, last_step=last_step)
    assert 0 < sum(sizes) <= budget, "somebody always gets tokens"
    for start, left, size in zip(starts, rest, sizes, strict=True):
        assert 0 <= size <= min(left, limit)
        if 0 < size < left and (start + size) % page:
            assert (start + size) // page == start // page, "a chunk that is cut ends with a page"
    turn = sorted(range(len(sizes)), key=lambda i: last_step[i]) if policy is EQUAL else range(len(sizes))
    first = next(iter(turn))
    if policy is not EQUAL:
        assert sizes[first] > 0, "the first in order is never left out"
        served = [size > 0 for size in sizes]
        assert served == sorted(served, reverse=True), "nobody is overtaken"
    elif sum(sizes) < sum(min(left, limit) for left in rest):
        # More for one than another by a page at most, unless that one has no more to get.
        most = max(sizes)
        for start, left, size in zip(starts, rest, sizes, strict=True):
            wanted = min(left, limit)
            if size < wanted and wanted - size >= page:
                assert most - size <= 3 * page, (start, left, size)


@given(
    rest=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    budget=st.integers(1, 30),
    limit=st.integers(1, 30),
    page=st.integers(1, 9),
    policy=st.sampled_from(ChunkingPolicy),
)
def test_all_contexts_end(
    rest: list[int], budget: int, limit: int, page: int, policy: ChunkingPolicy
) -> None:
    """Step after step, without arrivals: everybody is through after as many steps as there are tokens."""
    starts, last_step, left = [0] * len(rest), [-1] * len(rest), list(rest)
    for step in range(sum(rest)):
        going = [i for i, n in enumerate(left) if n]
        if not going:
            break
        sizes = sizes_of(
            policy,
            [left[i] for i in going],
            budget,
            limit=limit,
            page=page,
            starts=[starts[i] for i in going],
            last_step=[last_step[i] for i in going],
        )
        for i, size in zip(going, sizes, strict=True):
            starts[i] += size
            left[i] -= size
            last_step[i] = step if size else last_step[i]
    assert not any(left)
