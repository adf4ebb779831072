"""Every CPU tactic of every op against the op's reference, over the op's cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tapeout.plugins.case import Case, cases, tolerance
from tapeout.plugins.cpu import BoundCall, CpuTactic, HostCpu, StepState, TensorType
from tapeout.plugins.example import example, example_step, torch_dtype
from tapeout.plugins.native import NativeLibrary
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import CUDA_FUSED_OPS, OPS, TRACE_ONLY_OPS, cpu_tactics

GUARD_COLUMNS = 3


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a window into a wider buffer, as slices of a merged projection are."""
    if tensor.dim() < 2:
        return tensor
    wide = torch.full((tensor.shape[0], tensor.shape[1] + GUARD_COLUMNS, *tensor.shape[2:]), 77).to(
        tensor.dtype
    )
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def _guarded(kind: TensorType) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer and the output view inside it: guard rows around, guard columns beside."""
    rows, columns, *rest = (int(d) for d in kind.shape)
    dtype = torch_dtype(kind.dtype)
    buffer = torch.full((rows + 2, columns + GUARD_COLUMNS, *rest), _poison(dtype), dtype=dtype)
    return buffer, buffer[1:-1, :columns]


def _poison(dtype: torch.dtype) -> float | int:
    """What an element holds that nobody wrote."""
    return torch.nan if dtype.is_floating_point else 0x7F


def _assert_guards(buffer: torch.Tensor, columns: int, what: str) -> None:
    outside = torch.ones(buffer.shape[:2], dtype=torch.bool)
    outside[1:-1, :columns] = False
    guards = buffer[outside]
    untouched = guards.isnan() if guards.is_floating_point() else guards == _poison(guards.dtype)
    assert bool(untouched.all()), f"{what} wrote outside its output"


def _step(case: Case) -> StepState | None:
    if not case.sequences:
        return None
    kv_heads, head_dim = OPS[case.signature.op].cache_shape([t.shape for t in case.signature.inputs])
    return example_step(
        case.sequences,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=case.signature.inputs[1].dtype,
        layers=2,
        tokens_per_page=case.tokens_per_page,
    )


def _check(case: Case, rows: int, tactic: CpuTactic, kernels: NativeLibrary) -> None:
    types = example(case.signature, rows)
    placed = OPS[case.signature.op].place_weights(types.weights, case.signature.attrs)
    step = _step(case)
    expected_step = replace(step, kv_pool=step.kv_pool.clone()) if step else None
    expected = bind_reference(tactic.op, types.inputs, placed, case.signature.attrs, expected_step)()
    buffers = [_guarded(kind) for kind in types.outputs]
    inputs = tuple(_strided(t) for t in types.inputs)
    before = [t.clone() for t in inputs]
    weights = tactic.prepare(placed, case.signature.attrs)
    call = BoundCall(inputs, weights, [view for _, view in buffers], case.signature.attrs, step, kernels)
    run = tactic.bind(call)
    for replay in range(2):  # a bound call is replayed with new data in the same place
        for buffer, _ in buffers:
            buffer.fill_(_poison(buffer.dtype))
        run()
        for (buffer, view), wanted in zip(buffers, expected, strict=True):
            what = f"{tactic.op}/{tactic.name} {case.label} T={rows} replay {replay}"
            problem = tolerance(tactic.op, str(view.dtype).removeprefix("torch.")).violation(view, wanted)
            assert problem is None, f"{what}: {problem}"
            _assert_guards(buffer, view.shape[1], what)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True)), "an input was written"
    if step and expected_step:
        same = torch.allclose(step.kv_pool, expected_step.kv_pool, rtol=0, atol=0, equal_nan=True)
        assert same, f"{tactic.name} {case.label}: the cache differs from the reference's"


PAIRS = [(name, tactic.name) for name in OPS if name not in TRACE_ONLY_OPS for tactic in cpu_tactics(name)]


@pytest.mark.parametrize(("op_name", "tactic_name"), PAIRS, ids=[f"{o}-{t}" for o, t in PAIRS])
def test_tactic_matches_reference(
    op_name: str, tactic_name: str, kernels: NativeLibrary, host: HostCpu
) -> None:
    tactic = next(t for t in cpu_tactics(op_name) if t.name == tactic_name)
    ran = 0
    for case in cases(op_name):
        if tactic.unsupported(case.signature, host) is None:
            for rows in case.rows:
                _check(case, rows, tactic, kernels)
                ran += 1
    assert ran > 0


@pytest.mark.parametrize("op_name", [name for name in OPS if name not in TRACE_ONLY_OPS])
def test_baseline_and_native_support_every_case(op_name: str, host: HostCpu) -> None:
    tactics = {t.name: t for t in cpu_tactics(op_name)}
    assert cpu_tactics(op_name)[0].name == "aten"
    for case in cases(op_name):
        for name in ("aten",) if op_name in CUDA_FUSED_OPS else ("aten", "native"):
            assert tactics[name].unsupported(case.signature, host) is None, case.label
