"""A pack: everything a GPU machine needs to time the tactics of a model, without the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tapeout.compiler.cuda_plan import KernelTable, lacking_memory
from tapeout.compiler.files import check_output, remove_leftovers, temporary_file
from tapeout.compiler.progress import of_kernels
from tapeout.compiler.tactics.gpu_cases import (
    cache_of,
    checking_step,
    operands,
    outputs,
    stored_values,
    timing_step,
)
from tapeout.compiler.tactics.gpu_contests import Contender, Contest, reference_contender
from tapeout.compiler.tactics.gpu_expected import expected
from tapeout.compiler.tactics.gpu_region_pack import with_regions
from tapeout.compiler.tactics.gpu_regions import RegionContest
from tapeout.compiler.tactics.gpu_rivals import NO_RIVALS, Rivals
from tapeout.compiler.tactics.gpu_steps import StepContest, place_of
from tapeout.plugins.cuda import CudaTarget, KernelSpec, kernels_of
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.tactic_check.tools import tool_specs
from tapeout.plugins.triton_aot import CompiledKernel, compile_all, compile_kernel
from tapeout.plugins.triton_aot.digest import ptxas_version
from tapeout.runtime.engine.launches import RangeLaunches
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import Candidate, Entry, Pack, Samples, WholeStep
from tapeout.runtime.tactic_timer.pack_file import PackFile, encode_pack

_NOTHING = RangeLaunches(0, "", 0, ())


def make_pack(
    decisions: Sequence[Contest],
    limits: Limits,
    target: CudaTarget,
    target_name: str,
    progress: Callable[[str], None] = lambda text: None,
    steps: Sequence[StepContest] = (),
    regions: Sequence[RegionContest] = (),
    rivals: Rivals = NO_RIVALS,
) -> PackFile:
    """Compile all contenders and compute what their results are compared with.

    Args:
        steps: whole steps to time; all their contests are among the decisions.
        regions: to time against the segments of `rivals`; all their contests are among the decisions.
        target_name: the build's target, for example `cuda:h200`.

    Raises:
        TapeoutError: the reference of an op does not compile or fit on the target. A contender that
            does not is in the pack with the reason.
    """
    references = [reference_contender(contest, target) for contest in decisions]
    tools = dict(tool_specs(_float_types(decisions, target)))
    contenders = [*references, *(c for contest in decisions for c in contest.contenders)]
    specs = [kernel for c in contenders for kernel in kernels_of(c.chosen.launches)]
    progress(
        f"{len({s.key() for s in specs})} kernels of {sum(len(c.contenders) for c in decisions)} tactics"
    )
    compiled, failures = _compile([*specs, *tools.values()], target, of_kernels(progress))
    table = KernelTable(compiled)
    numbers = _Numbers()
    entries = []
    for index, (contest, reference) in enumerate(zip(decisions, references, strict=True), start=1):
        progress(f"reference values, {index} of {len(decisions)}: {contest.signature.op}")
        if reason := _failure(reference, failures):
            raise TapeoutError(f"the reference of {contest.key} cannot run on sm_{target.sm}: {reason}")
        entries.append(_entry(contest, reference, limits, target, table, failures, numbers))
    indices = {name: table.number(spec.key()) for name, spec in tools.items()}
    pack = Pack(
        target=target_name,
        sm=target.sm,
        sm_count=target.sm_count,
        cuda=ptxas_version(target.sm),
        kernels=tuple(table.table),
        tools=indices,
        entries=tuple(entries),
        steps=_whole_steps(steps, decisions),
    )
    if not regions:
        return PackFile(pack, table.cubins, numbers.array())
    places = {place_of(contest): number for number, contest in enumerate(decisions)}
    pack, plans = with_regions(pack, regions, rivals, places, numbers.place)
    return PackFile(pack, table.cubins, numbers.array(), plans)


def write_pack(file: PackFile, path: Path) -> int:
    """Write a pack through a temporary name; returns its bytes. Raises UsageError when it cannot be."""
    target = check_output(path, "pack")
    remove_leftovers(target)
    data = encode_pack(file)
    with temporary_file(target) as (temporary, stream):
        stream.write(data)
        stream.flush()
        temporary.replace(target)
    return len(data)


def _entry(
    contest: Contest,
    reference: Contender,
    limits: Limits,
    target: CudaTarget,
    table: KernelTable,
    failures: Mapping[str, str],
    numbers: _Numbers,
) -> Entry:
    signature = contest.signature
    values = {name: np.array(v, np.float32) for name, v in stored_values(signature).items()}
    check = checking_step(signature, contest.kind, contest.rows, limits)
    inputs, weights = operands(signature, check, {n: numbers.place(a) for n, a in values.items()})
    entry = Entry(
        signature=contest.key,
        op=signature.op,
        kind=contest.kind,
        conditions=contest.conditions,
        rows=contest.rows,
        symbol=str(signature.outputs[0].shape[0]),
        attrs=dict(signature.attrs),
        inputs=inputs,
        weights=weights,
        outputs=outputs(signature),
        cache=cache_of(signature, target),
        check=check,
        timing=timing_step(signature, contest.kind, contest.rows, limits),
        samples=(),
        reference=_candidate(reference, table, {}),
        # Configurations that come to the same kernels, as float32's do, are timed once.
        candidates=tuple(
            _candidate(c, table, failures)
            for c in {c.kernel_hash: c for c in reversed(contest.contenders)}.values()
        )[::-1],
    )
    samples = tuple(
        Samples(s.output, s.rows, s.columns, numbers.place(s.values))
        for s in expected(signature, entry, values)
    )
    return replace(entry, samples=samples)


def _whole_steps(steps: Sequence[StepContest], decisions: Sequence[Contest]) -> tuple[WholeStep, ...]:
    numbers = {place_of(contest): number for number, contest in enumerate(decisions)}
    made = []
    for step in steps:
        ops = tuple(numbers[place_of(contest)] for contest in step.contests)
        fixed = {numbers[place_of(c)] for c in step.contests if c.key in step.fixed}
        made.append(WholeStep(step.kind, step.conditions, step.rows, ops, tuple(sorted(fixed))))
    return tuple(made)


def _candidate(contender: Contender, table: KernelTable, failures: Mapping[str, str]) -> Candidate:
    reason = _failure(contender, failures)
    launches = _NOTHING if reason else table.range_launches(contender.chosen)
    return Candidate(contender.name, contender.kernel_hash, reason, launches)


def _failure(contender: Contender, failures: Mapping[str, str]) -> str:
    """Why one of its kernels cannot run; "" when all can."""
    keys = (kernel.key() for kernel in kernels_of(contender.chosen.launches))
    return next((failures[key] for key in keys if key in failures), "")


def _compile(
    specs: Sequence[KernelSpec], target: CudaTarget, progress: Callable[[int, int], None]
) -> tuple[dict[str, CompiledKernel], dict[str, str]]:
    """Compiled kernels by key, and why others cannot run: one bad configuration costs itself."""
    unique = {spec.key(): spec for spec in specs}
    failures: dict[str, str] = {}
    try:
        kernels = compile_all(list(unique.values()), target.sm, progress=progress)
        compiled = dict(zip(unique, kernels, strict=True))
    except TapeoutError:
        compiled = {}
        for count, (key, spec) in enumerate(unique.items()):
            progress(count, len(unique))
            try:
                compiled[key] = compile_kernel(spec, target.sm)
            except TapeoutError as error:
                failures[key] = error.message.splitlines()[0]
    for key, kernel in compiled.items():
        if reason := lacking_memory(kernel, target):
            failures[key] = reason
    return compiled, failures


def _float_types(decisions: Iterable[Contest], target: CudaTarget) -> set[str]:
    types = {
        kind.dtype
        for contest in decisions
        for kind in (
            *contest.signature.inputs,
            *contest.signature.weights,
            *contest.signature.outputs,
        )
    }
    return {t for t in (*types, target.kv_dtype) if "float" in t}


class _Numbers:
    """Float32 numbers one after the other."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._count = 0

    def place(self, values: np.ndarray) -> int:
        """Append them; returns where they start."""
        start = self._count
        self._parts.append(np.asarray(values, np.float32).reshape(-1))
        self._count += values.size
        return start

    def array(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self._parts])
