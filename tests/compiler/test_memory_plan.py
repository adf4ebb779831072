"""The arena plan: buffers alive together never overlap, and little is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.compiler.memory_plan import BufferRequest, plan_arena
from tapeout.plugins.errors import TapeoutError


@st.composite
def requests(draw: st.DrawFn) -> list[BufferRequest]:
    spans = draw(
        st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 30), st.integers(0, 8)), max_size=40)
    )
    return [
        BufferRequest(f"b{i}", size, first, first + length) for i, (size, first, length) in enumerate(spans)
    ]


def aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@given(requests(), st.sampled_from([1, 64, 256]))
def test_live_buffers_never_overlap(buffers: list[BufferRequest], alignment: int) -> None:
    offsets, arena_bytes = plan_arena(buffers, alignment)
    assert list(offsets) == [b.name for b in buffers]
    assert arena_bytes % alignment == 0
    for i, a in enumerate(buffers):
        assert offsets[a.name] % alignment == 0
        assert 0 <= offsets[a.name] <= offsets[a.name] + a.size_bytes <= arena_bytes
        for b in buffers[i + 1 :]:
            if a.overlaps(b) and a.size_bytes and b.size_bytes:
                before = offsets[a.name] + a.size_bytes <= offsets[b.name]
                assert before or offsets[b.name] + b.size_bytes <= offsets[a.name]


@given(requests())
def test_arena_is_between_the_live_maximum_and_the_sum(buffers: list[BufferRequest]) -> None:
    _, arena_bytes = plan_arena(buffers)
    sizes = [aligned(b.size_bytes, 64) for b in buffers]
    live = [sum(s for b, s in zip(buffers, sizes, strict=True) if b.first <= t <= b.last) for t in range(40)]
    assert max(live) <= arena_bytes <= sum(sizes)


@given(requests(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_order(buffers: list[BufferRequest], random: object) -> None:
    shuffled = list(buffers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dict(plan_arena(buffers)[0]) == dict(plan_arena(shuffled)[0])


def test_a_chain_of_layers_needs_no_more_than_its_live_maximum() -> None:
    layers = [BufferRequest(f"l{i}", 1000, i, i + 1) for i in range(50)]
    residual = BufferRequest("residual", 500, 0, 50)
    _, arena_bytes = plan_arena([*layers, residual])
    assert arena_bytes == 2 * aligned(1000, 64) + aligned(500, 64)


def test_the_smallest_gap_that_fits_is_taken() -> None:
    buffers = [
        BufferRequest("big", 1024, 0, 0),
        BufferRequest("keep1", 640, 0, 2),
        BufferRequest("small", 320, 0, 0),
        BufferRequest("keep2", 256, 0, 2),
        BufferRequest("late", 192, 1, 1),
    ]
    offsets, _ = plan_arena(buffers)
    assert offsets["late"] == offsets["small"]


def test_every_bad_request_is_listed() -> None:
    bad = [BufferRequest("a", -1, 0, 0), BufferRequest("b", 1, 3, 2), BufferRequest("b", 1, 0, 1)]
    with pytest.raises(
        TapeoutError, match=r"a: size -1 bytes.*\n.*b: lifetime \[3, 2\].*\n.*b: requested twice"
    ):
        plan_arena(bad)
