"""A tactic that says so gives a row the same bits alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeout.plugins.case import Case, cases
from tapeout.plugins.cpu import BoundCall, CpuTactic, StepState
from tapeout.plugins.example import example, example_step, torch_dtype
from tapeout.plugins.native import NativeLibrary
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS, cpu_tactics

MAX_ROWS = 40
INVARIANT = [
    (name, tactic.name)
    for name in OPS
    if name not in TRACE_ONLY_OPS and not OPS[name].reads_cache
    for tactic in cpu_tactics(name)
    if tactic.batch_invariant
]


def _run(
    tactic: CpuTactic, case: Case, inputs: list, weights: tuple, kernels: NativeLibrary
) -> list[torch.Tensor]:
    logit_rows = inputs[-1].shape[0]
    rows = inputs[0].shape[0]
    kinds = example(case.signature, rows, logit_rows=logit_rows).outputs
    outputs = [torch.empty(k.shape, dtype=torch_dtype(k.dtype)) for k in kinds]
    prepared = tactic.prepare(weights, case.signature.attrs)
    tactic.bind(BoundCall(inputs, prepared, outputs, case.signature.attrs, None, kernels))()
    return outputs


@pytest.mark.parametrize(("op_name", "tactic_name"), INVARIANT, ids=[f"{o}-{t}" for o, t in INVARIANT])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_their_batch(
    op_name: str, tactic_name: str, kernels: NativeLibrary, data: st.DataObject
) -> None:
    tactic = next(t for t in cpu_tactics(op_name) if t.name == tactic_name)
    case = data.draw(st.sampled_from(cases(op_name)), label="case")
    rows = data.draw(st.integers(1, MAX_ROWS), label="rows")
    row = data.draw(st.integers(0, rows - 1), label="row")
    arguments = example(case.signature, rows, logit_rows=rows)
    weights = OPS[op_name].place_weights(arguments.weights, case.signature.attrs)
    batch = _run(tactic, case, list(arguments.inputs), weights, kernels)
    if op_name == "select_rows":
        one = [arguments.inputs[0], arguments.inputs[1][row : row + 1]]
    else:
        one = [t[row : row + 1] for t in arguments.inputs]
    alone = _run(tactic, case, one, weights, kernels)
    for a, b in zip(alone, batch, strict=True):
        assert torch.equal(a[0], b[row])


def _attend(
    step: StepState, q: torch.Tensor, kv: torch.Tensor, attrs: dict, kernels: NativeLibrary
) -> torch.Tensor:
    tactic = next(t for t in cpu_tactics("paged_attention") if t.name == "native")
    out = torch.empty_like(q)
    tactic.bind(BoundCall((q, kv, kv * 0.5), (), (out,), attrs, step, kernels))()
    return out


@settings(max_examples=15, deadline=None)
@given(
    others=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90)), max_size=4),
    place=st.integers(0, 4),
    length=st.integers(2, 90),
    cut=st.integers(1, 89),
    window=st.sampled_from([0, 1, 20, 50]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    tokens_per_page=st.sampled_from([16, 32, 64]),
)
def test_attention_does_not_depend_on_batch_chunks_or_pages(
    kernels: NativeLibrary,
    others: list[tuple[int, int]],
    place: int,
    length: int,
    cut: int,
    window: int,
    dtype: str,
    tokens_per_page: int,
) -> None:
    """A prompt prefilled at once among others equals the prompt alone in two chunks."""
    heads, kv_heads, dim = 6, 2, 16
    attrs = {"layer": 0, "scale": 0.25, "window": window, "softcap": 0.0, "alibi": False}
    sequences = [(q, q + cached) for q, cached in others]
    place = min(place, len(sequences))
    sequences.insert(place, (length, length))
    kind = {"kv_heads": kv_heads, "head_dim": dim, "dtype": dtype}
    step = example_step(sequences, tokens_per_page=tokens_per_page, **kind)
    rows = int(step.counts[0])
    q = torch.randn(rows, heads, dim).to(torch_dtype(dtype))
    kv = torch.randn(rows, kv_heads, dim).to(torch_dtype(dtype))
    first = int(step.cu_q[place])
    together = _attend(step, q, kv, attrs, kernels)[first : first + length]

    q, kv, cut = q[first : first + length], kv[first : first + length], min(cut, length - 1)
    chunk = example_step([(cut, cut)], tokens_per_page=128, **kind)
    alone = [_attend(chunk, q[:cut], kv[:cut], attrs, kernels)]
    rest = example_step([(length - cut, length)], tokens_per_page=128, **kind)
    page = int(rest.page_table[0, 0])
    rest.kv_pool[page] = chunk.kv_pool[int(chunk.page_table[0, 0])]
    alone.append(_attend(rest, q[cut:], kv[cut:], attrs, kernels))
    assert torch.equal(torch.cat(alone), together)
