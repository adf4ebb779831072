"""The launch program of real tiny models: every buffer in its place, choices shared between layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tapeout.compiler.plan import plan_program, signatures_of
from tapeout.runtime.engine.container import tensor_bytes
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import STEP_INPUTS, Program, TacticRange, View

LIMITS = Limits(max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_page=4)
ROWS = {"T": LIMITS.max_num_tokens, "R": LIMITS.max_batch_size}
MODELS = {"llama": {}, "qwen3": {}, "gemma3_text": {"lengths": (33, 11), "sliding_window": 8}}


@pytest.fixture(params=MODELS)
def program(request: pytest.FixtureRequest, family: Callable[..., Any]) -> Program:
    module = family(request.param, **MODELS[request.param]).module
    ranges = {
        key: (TacticRange(ROWS[str(s.outputs[0].shape[0])], "aten"),)
        for key, s in signatures_of(module).items()
    }
    return plan_program(module, LIMITS, ranges)


def extent_bytes(view: View) -> int:
    """Bytes from the buffer's start to the view's last element, at the limits."""
    sizes = [ROWS[str(view.shape[0])], *(int(d) for d in view.shape[1:])]
    last = view.offset + sum((n - 1) * s for n, s in zip(sizes, view.strides, strict=True))
    return tensor_bytes(view.dtype, (last + 1,))


def lifetimes(program: Program) -> Iterator[tuple[str, int, int]]:
    """(buffer, first record, last record) from the records alone."""
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    for index, record in enumerate(program.records):
        for view in record.outputs:
            assert view.buffer not in written, f"{view.buffer} is written twice"
            written[view.buffer] = index
        for view in record.inputs:
            assert view.buffer in STEP_INPUTS or written[view.buffer] < index
            read[view.buffer] = index
    read[program.logits.buffer] = len(program.records)
    for name, first in written.items():
        yield name, first, read.get(name, first)


def test_every_output_of_every_record_lies_inside_the_arena(program: Program) -> None:
    buffers = {b.name: b for b in program.buffers}
    outputs = [v for record in program.records for v in record.outputs]
    assert {v.buffer for v in outputs} == buffers.keys()
    for view in outputs:
        buffer = buffers[view.buffer]
        assert (view.dtype, view.shape) == (buffer.dtype, buffer.shape)
        assert extent_bytes(view) == buffer.size_bytes
        assert 0 <= buffer.offset_bytes <= buffer.offset_bytes + buffer.size_bytes <= program.arena_bytes
    for view in (v for record in program.records for v in record.inputs):
        if view.buffer not in STEP_INPUTS:
            assert extent_bytes(view) <= buffers[view.buffer].size_bytes


def test_buffers_that_are_alive_together_are_disjoint(program: Program) -> None:
    buffers = {b.name: b for b in program.buffers}
    pairs = 0
    for (a, a_first, a_last), (b, b_first, b_last) in itertools.combinations(lifetimes(program), 2):
        if max(a_first, b_first) <= min(a_last, b_last):
            pairs += 1
            x, y = buffers[a], buffers[b]
            apart = (
                x.offset_bytes + x.size_bytes <= y.offset_bytes
                or y.offset_bytes + y.size_bytes <= x.offset_bytes
            )
            assert apart, f"{a} and {b} share bytes"
    assert pairs > len(program.records)


def test_memory_is_reused(program: Program) -> None:
    assert program.arena_bytes < sum(b.size_bytes for b in program.buffers) / 2
    widest = max(
        sum(extent_bytes(v) for v in record.outputs if v.buffer not in STEP_INPUTS)
        for record in program.records
    )
    assert widest <= program.arena_bytes


def test_logits_are_the_last_result(program: Program) -> None:
    assert program.logits.buffer == program.records[-1].outputs[0].buffer
    assert program.logits.shape == ("R", 300)


def test_layers_share_signatures(family: Callable[..., Any]) -> None:
    """Three layers need no more choices than two."""
    two, three = family("llama").module, family("llama", num_hidden_layers=3).module
    assert signatures_of(two) == signatures_of(three)
    attention = [k for k in signatures_of(three) if k.startswith("paged_attention")]
    assert len(attention) == 1
    assert "layer" not in attention[0]
    assert len([n for n in three.nodes if n.op == "paged_attention"]) == 3


def test_windows_do_not_share(family: Callable[..., Any]) -> None:
    module = family("gemma3_text", **MODELS["gemma3_text"]).module
    attention = [s for s in signatures_of(module).values() if s.op == "paged_attention"]
    assert sorted(int(s.attrs["window"]) for s in attention) == [0, 8]


def test_every_record_finds_its_tactic(program: Program) -> None:
    assert {r.signature for r in program.records} == program.signatures.keys() == program.tactics.keys()


def test_the_arena_grows_with_the_limits(family: Callable[..., Any]) -> None:
    module = family("llama").module
    small, large = (plan_program(module, Limits(4, tokens, 64, 4), {}).arena_bytes for tokens in (16, 160))
    assert math.isclose(large / small, 10, rel_tol=0.25)  # logits rows stay the same
