"""Check one tactic against the op's reference, then time it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tapeout.compiler.tactics.case import Case, layerless
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.case import tolerance
from tapeout.plugins.cpu import BoundCall, CpuTactic, OpSignature, StepState
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import OPS

_MIN_SECONDS = 0.02  # of timing a candidate, after a warm-up pass
_MIN_PASSES, _MAX_PASSES = 5, 200
_PASS_SECONDS = 1e-3
_HOPELESS = 4  # times the best: what one call must take to have lost


def reference_outputs(signature: OpSignature, case: Case) -> tuple[torch.Tensor, ...]:
    """What the op's torch reference makes of the case (with a KV pool of its own)."""
    attrs = layerless(signature.attrs, signature.op)
    step = _with_own_pool(case.step)
    return bind_reference(signature.op, case.inputs, case.weights[0], attrs, step)()


def measure(
    tactic: CpuTactic,
    signature: OpSignature,
    case: Case,
    expected: tuple[torch.Tensor, ...],
    prepared: list[Any],
    kernels: Any,
    best_us: float = math.inf,
) -> Outcome:
    """Correct first: a tactic whose output differs from the reference is never timed.

    `best_us` is the time of the best tactic so far.
    """
    try:
        outputs = case.outputs()
        _bind(tactic, signature, case, prepared[0], outputs, _with_own_pool(case.step), kernels)()
        reason = _difference(signature, outputs, expected)
        if reason is not None:
            return Outcome(None, reason)
        calls = [_bind(tactic, signature, case, p, outputs, case.step, kernels) for p in prepared]
        # Rounded here and not in the cache: a warm build must choose from the same figures.
        return Outcome(round(_fastest_us(calls, best_us), 3))
    except Exception as error:  # a candidate that fails is a lost candidate, not a lost build
        return failure(error)


def failure(error: Exception) -> Outcome:
    """The outcome of a tactic that raised."""
    return Outcome(None, f"{type(error).__name__}: {error}".splitlines()[0])


def _bind(
    tactic: CpuTactic,
    signature: OpSignature,
    case: Case,
    weights: Any,
    outputs: tuple[torch.Tensor, ...],
    step: StepState,
    kernels: Any,
) -> Callable[[], None]:
    attrs = layerless(signature.attrs, signature.op)
    return tactic.bind(BoundCall(case.inputs, weights, outputs, attrs, step, kernels))


def _with_own_pool(step: StepState) -> StepState:
    return dataclasses.replace(step, kv_pool=step.kv_pool.clone())


def _difference(
    signature: OpSignature, outputs: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> str | None:
    """None when equal within the op's tolerance, else how far apart."""
    for name, type_, got, want in zip(
        OPS[signature.op].outputs, signature.outputs, outputs, expected, strict=True
    ):
        violation = tolerance(signature.op, type_.dtype).violation(got, want.reshape(got.shape))
        if violation is not None:
            return f"output {name}: {violation}"
    return None


def _fastest_us(calls: Sequence[Callable[[], None]], best_us: float) -> float:
    """The fastest pass's mean time a call: what shares the machine only ever adds time.

    Calls rotate through all copies of the weights; a pass is long enough for the clock. A tactic
    whose first calls take many times the best one's time has lost and is not timed further.
    """
    rotation = itertools.cycle(calls)
    first = min(_seconds(rotation, 1), _seconds(rotation, 1))
    if first * 1e6 > _HOPELESS * best_us:
        return first * 1e6
    count = min(len(calls), math.ceil(_PASS_SECONDS / first))
    passes: list[float] = []
    begin = time.perf_counter()
    while len(passes) < _MIN_PASSES or (
        len(passes) < _MAX_PASSES and time.perf_counter() - begin < _MIN_SECONDS
    ):
        passes.append(_seconds(rotation, count))
    return min(passes) * 1e6


def _seconds(rotation: Iterator[Callable[[], None]], count: int) -> float:
    """Mean seconds of the next `count` calls."""
    chosen = list(itertools.islice(rotation, count))
    start = time.perf_counter()
    for call in chosen:
        call()
    return (time.perf_counter() - start) / count
