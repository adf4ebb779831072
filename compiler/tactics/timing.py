"""Check one tactic against the op's reference, then time it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tapeout.compiler.tactics.case import Case, layerless
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.case import tolerance
from tapeout.plugins.cpu import BoundCall, CpuTactic, OpSignature, StepState
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import OPS

_MIN_SECONDS = 0.02  # of timing a candidate, after a warm-up pass
_MAX_SECONDS = 0.3  # where the fastest passes do not tell yet what the candidate takes by itself
_MIN_PASSES, _MAX_PASSES = 5, 200
_AGREE = 1.1  # times the fastest pass: what the next one may have taken
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
    whose first calls take many times the best one's time has lost and is not timed further. On a busy
    machine it goes on, up to a limit, until the fastest passes are the tactic's own time.
    """
    rotation, begin = itertools.cycle(calls), time.perf_counter()
    passes = [_pass(rotation, 1), _pass(rotation, 1)]

    def hopeless() -> bool:
        return min(passes).seconds * 1e6 > _HOPELESS * best_us

    while hopeless() and not _settled(passes) and time.perf_counter() - begin < _MAX_SECONDS:
        passes.append(_pass(rotation, 1))
    first = min(passes).seconds
    if hopeless():
        return first * 1e6
    count = min(len(calls), math.ceil(_PASS_SECONDS / first))
    passes, begin = [], time.perf_counter()
    while True:
        passes.append(_pass(rotation, count))
        took = time.perf_counter() - begin
        enough = len(passes) >= _MIN_PASSES and (len(passes) >= _MAX_PASSES or took >= _MIN_SECONDS)
        if enough and (_settled(passes) or took >= _MAX_SECONDS):
            return min(passes).seconds * 1e6


class _Pass(NamedTuple):
    """Mean seconds of its calls, and how often another program took a processor from them."""

    seconds: float
    interrupted: int


def _pass(rotation: Iterator[Callable[[], None]], count: int) -> _Pass:
    """The next `count` calls."""
    chosen = list(itertools.islice(rotation, count))
    before = _interruptions()
    start = time.perf_counter()
    for call in chosen:
        call()
    seconds = (time.perf_counter() - start) / count
    return _Pass(seconds, _interruptions() - before)


def _settled(passes: Sequence[_Pass]) -> bool:
    """Are the two fastest passes undisturbed and about the same?

    About the same is not enough: with every core taken, threads that wait for one another measure whole time
    slices of the scheduler, which are alike.
    """
    first, second = sorted(passes)[:2]
    return not (first.interrupted or second.interrupted) and second.seconds <= _AGREE * first.seconds


def _interruptions() -> int:
    """How often threads of this process had to leave a processor that they could have used on."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
