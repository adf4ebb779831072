"""The search for the fastest step, on steps whose times are made up."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tapeout.runtime.tactic_timer.plan_search import NEAR, Plan, fastest_plan, finalists

Cost = Callable[[Plan], float]
SHARES = {0: 50.0, 1: 30.0, 2: 20.0}


def search(cost: Cost, **rivals: int) -> tuple[Plan, float, float, int]:
    """Plan, its time, that of the fastest alone, and how many comparisons it took."""
    asked = 0

    def compare(plan: Plan, rival: Plan) -> tuple[float, float]:
        nonlocal asked
        asked += 1
        return cost(plan), cost(rival)

    counts = {int(name[1:]): count for name, count in rivals.items()}
    found = fastest_plan({e: list(range(n)) for e, n in counts.items()}, SHARES, compare)
    return found.plan, found.time_us, found.alone_us, asked


def test_who_is_slow_among_neighbours_loses() -> None:
    """Entry 1's fastest alone does not go with entry 0's; entry 2 is as fast with either."""
    plan, time_us, alone_us, _ = search(lambda p: 100 + 15 * (p[1] == 0) + 2 * (p[1] == 2), e0=1, e1=3, e2=2)
    assert (plan, time_us, alone_us) == ({0: 0, 1: 1, 2: 0}, 100, 115)


def test_the_fastest_alone_stay_where_nothing_is_faster() -> None:
    plan, time_us, alone_us, asked = search(lambda p: 100 + sum(p.values()), e0=4, e1=4, e2=4)
    assert (plan, time_us, alone_us) == ({0: 0, 1: 0, 2: 0}, 100, 100)
    assert asked == 9 + 1  # each rival once: the second pass has nothing to look at


def test_without_rivals_a_step_is_timed_once() -> None:
    assert search(lambda p: 7, e0=1, e1=1) == ({0: 0, 1: 0}, 7, 7, 1)


def test_noise_decides_nothing() -> None:
    plan, *_ = search(lambda p: 100 - 0.2 * p[0], e0=2, e1=1)
    assert plan == {0: 0, 1: 0}
    plan, *_ = search(lambda p: 100 - 0.4 * p[0], e0=2, e1=1)
    assert plan == {0: 1, 1: 0}


def test_a_second_pass_sees_what_the_first_has_changed() -> None:
    """Entry 0 gains only once entry 1 has changed, which is tried after it."""
    plan, time_us, *_ = search(lambda p: 100 - 5 * p[1] - 5 * (p[0] and p[1]), e0=2, e1=2)
    assert (plan, time_us) == ({0: 1, 1: 1}, 90)


def test_who_cannot_matter_is_not_tried() -> None:
    shares = {0: 1000.0, 1: 1.0}
    tried: list[Plan] = []

    def compare(plan: Plan, rival: Plan) -> tuple[float, float]:
        tried.append(rival)
        return 1.0, 1.0

    fastest_plan({0: [0], 1: [0, 1]}, shares, compare)
    assert tried == [{0: 0, 1: 0}]


def test_a_gain_that_does_not_come_again_is_none() -> None:
    """A measurement that was lucky once: the last comparison of the two plans decides."""
    times = iter([(100.0, 90.0), (100.0, 101.0)])
    found = fastest_plan({0: [3, 5], 1: [0]}, SHARES, lambda plan, rival: next(times))
    assert (found.plan, found.time_us, found.alone_us) == ({0: 3, 1: 0}, 100, 100)


@given(st.dictionaries(st.text("abc", min_size=1), st.floats(0.5, 1e6), min_size=1))
def test_finalists_are_the_best_near_the_best(times: dict[str, float]) -> None:
    names = finalists(times)
    best = min(times.values())
    assert times[names[0]] == best
    assert all(times[name] <= NEAR * best for name in names)
    near = sorted(time for time in times.values() if time <= NEAR * best)
    assert [times[name] for name in names] == near[:4]
    assert finalists(dict(reversed(times.items()))) == names  # whatever order they are told in


def test_no_pass_runs_for_ever() -> None:
    """Times that always say that the other one is faster."""
    asked = 0

    def compare(plan: Plan, rival: Plan) -> tuple[float, float]:
        nonlocal asked
        asked += 1
        return 100.0, 50.0

    fastest_plan({e: [0, 1, 2, 3] for e in SHARES}, SHARES, compare)
    assert asked <= 2 * 3 * 4 + 1
