"""From chosen CUDA tactics to what an engine stores: cubins and the launch table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from tapeout.compiler.plan import buckets, max_rows
from tapeout.compiler.progress import of_kernels
from tapeout.compiler.tactics.usable import split_usable
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import (
    NATIVE,
    CudaTactic,
    CudaTarget,
    KernelSpec,
    Launchable,
    LaunchSpec,
    MatmulAlgorithm,
    MatmulSpec,
    kernels_of,
)
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.sample.cuda import receive_launch, sample_launches, sample_workspace_bytes
from tapeout.plugins.triton_aot import CompiledKernel, compile_all
from tapeout.runtime.engine.launches import (
    Grid,
    Kernel,
    KernelArg,
    Launch,
    LaunchTable,
    Matmul,
    RangeLaunches,
)
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import TacticRange

#: Kernels load 16 bytes at once: rows start at multiples of this many elements, windows of as many bytes.
ROW_MULTIPLE = 16

#: Launches and bytes of workspace by logit rows.
_Sampling = Mapping[int, tuple[tuple[LaunchSpec, ...], int]]


@dataclass(frozen=True)
class CudaPlan:
    """The launch table, and cubins by name."""

    table: LaunchTable
    cubins: Mapping[str, bytes]


@dataclass(frozen=True)
class Chosen:
    """A tactic's launches for row counts up to `rows`."""

    rows: int
    tactic: CudaTactic
    launches: tuple[Launchable, ...]
    workspace_bytes: int

    def with_algorithm(self, algorithm: MatmulAlgorithm) -> Chosen:
        """The same with its product's algorithm, which stands last in the workspace."""
        spared, launches = 0, []
        for item in self.launches:
            if isinstance(item, MatmulSpec):
                spared += item.workspace_bytes - algorithm.workspace_bytes
                item = replace(item, algorithm=algorithm, workspace_bytes=algorithm.workspace_bytes)
            launches.append(item)
        return replace(self, launches=tuple(launches), workspace_bytes=self.workspace_bytes - spared)


@dataclass(frozen=True)
class CudaChoices:
    """Tactics by signature key, over ascending rows.

    Attributes:
        mixed: of every signature, for steps of any kind.
        decode: of those signatures that run otherwise in steps in which every sequence has one row.
    """

    mixed: Mapping[str, tuple[Chosen, ...]]
    decode: Mapping[str, tuple[Chosen, ...]]

    def all(self) -> tuple[Chosen, ...]:
        return tuple(c for kind in (self.mixed, self.decode) for row in kind.values() for c in row)


def choose_cuda(
    signatures: Mapping[str, OpSignature],
    limits: Limits,
    target: CudaTarget,
    *,
    batch_invariant: bool,
    unfit: Mapping[str, str] = MappingProxyType({}),
) -> CudaChoices:
    """Default tactics, of our own kernels; nothing is timed.

    Args:
        batch_invariant: one tactic for all rows, among those whose rows do not depend on company.
        unfit: kernels that the target cannot run, as `unfit_kernels` gives them.

    Raises:
        UnsupportedError: ops that no tactic can run on the target, all of them listed.
    """
    mixed, decode, missing = {}, {}, []
    for key, signature in signatures.items():
        known, reasons = usable_tactics(signature, target, batch_invariant, frozenset({NATIVE}))
        usable = [t for t in known if t.interpretable]
        reasons |= {t.name: "only timing on the GPU can check it" for t in known if not t.interpretable}
        general = [t for t in usable if not t.decode_only]
        sizes = buckets(max_rows(signature.outputs[0].shape, limits))
        fit = partial(fitting_tactics, signature, target, unfit, reasons)
        by_rows = {rows: fit(general, rows) for rows in sizes}
        decode_rows: dict[int, list[CudaTactic]] = {}
        if batch_invariant:
            left = [t for t in general if all(t in tactics for tactics in by_rows.values())]
            if left:
                total_us = partial(_total_us, signature, sizes, target)
                left = [min(suited_tactics(left, sizes[-1]), key=total_us)]
            by_rows = dict.fromkeys(sizes, left)
        elif len(usable) > len(general):
            decode_rows = {rows: fit(usable, rows) for rows in decode_buckets(limits)}
        if not all((*by_rows.values(), *decode_rows.values())):
            missing.append(f"{key}:")
            missing += [f"  {name}: {reason}" for name, reason in reasons.items()]
            continue
        mixed[key], decode_row = (
            merge_ranges([chosen_at(signature, tactics, rows, target) for rows, tactics in found.items()])
            for found in (by_rows, decode_rows)
        )
        if decode_row:
            decode[key] = decode_row
    if missing:
        raise UnsupportedError(
            f"no CUDA tactic on sm_{target.sm} for these ops:\n" + "\n".join(f"  {m}" for m in missing),
            hint="--target cpu runs them",
        )
    return CudaChoices(mixed, decode)


def decode_buckets(limits: Limits) -> tuple[int, ...]:
    """Padded row counts of steps in which every sequence has one row."""
    return buckets(min(limits.max_batch_size, limits.max_num_tokens))


def usable_tactics(
    signature: OpSignature, target: CudaTarget, batch_invariant: bool, providers: Container[str]
) -> tuple[list[CudaTactic], dict[str, str]]:
    """Tactics of the providers that can run the signature (those for decode only too), and why others
    cannot."""
    return split_usable(
        (tactic for tactic in cuda_tactics(signature.op) if tactic.provider in providers),
        lambda tactic: tactic.unsupported(signature, target),
        batch_invariant,
    )


def fitting_tactics(
    signature: OpSignature,
    target: CudaTarget,
    unfit: Mapping[str, str],
    reasons: dict[str, str],
    tactics: Sequence[CudaTactic],
    rows: int,
) -> list[CudaTactic]:
    """Those none of whose kernels at a bucket of `rows` is in `unfit`; why the others are out is added
    to `reasons`."""
    if not unfit:
        return list(tactics)
    fitting = []
    for tactic in tactics:
        keys = [kernel.key() for kernel in kernels_of(tactic.launches(signature, rows, target))]
        if bad := [key for key in keys if key in unfit]:
            reasons.setdefault(tactic.name, unfit[bad[0]])
        else:
            fitting.append(tactic)
    return fitting


def unfit_kernels(
    choices: CudaChoices, target: CudaTarget, progress: Callable[[str], None] = lambda text: None
) -> dict[str, str]:
    """Kernels of the choice, by key, that compile for the target and cannot be launched there, and why."""
    specs = {kernel.key(): kernel for c in choices.all() for kernel in kernels_of(c.launches)}
    compiled = compile_all(list(specs.values()), target.sm, progress=of_kernels(progress))
    reasons = {key: lacking_memory(k, target) for key, k in zip(specs, compiled, strict=True)}
    return {key: reason for key, reason in reasons.items() if reason is not None}


def lacking_memory(kernel: CompiledKernel, target: CudaTarget) -> str | None:
    """Why a block of the kernel does not fit on the target; None when it does. Only compiling it tells."""
    if kernel.shared_bytes <= target.shared_bytes_per_block:
        return None
    return (
        f"{kernel.symbol} takes {kernel.shared_bytes} bytes of shared memory a block, sm_{target.sm} has "
        f"{target.shared_bytes_per_block}"
    )


def ranges_of(chosen: Mapping[str, tuple[Chosen, ...]]) -> dict[str, tuple[TacticRange, ...]]:
    """The choice as a program holds it."""
    return {key: tuple(TacticRange(c.rows, c.tactic.name) for c in row) for key, row in chosen.items()}


def kernels_to_compile(chosen: CudaChoices, logits: TensorType, ids: int, limits: Limits) -> list[KernelSpec]:
    """The kernels of an engine; the arguments are those of `plan_cuda`. Some stand there many times."""
    receive, samplings = _around(logits, ids, limits)
    launches = [receive, *(s for kind in samplings for specs, _ in kind.values() for s in specs)]
    return kernels_of([*launches, *(s for c in chosen.all() for s in c.launches)])


def _around(logits: TensorType, ids: int, limits: Limits) -> tuple[LaunchSpec, list[_Sampling]]:
    """What runs before the model's ops; and after them: sampling, then all that sampling can do."""
    receive = receive_launch(
        limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len, limits.tokens_per_page
    )
    return receive, [
        {
            rows: (
                sample_launches(logits, rows, ids, full=full),
                sample_workspace_bytes(logits, rows, full=full),
            )
            for rows in buckets(limits.max_batch_size)
        }
        for full in (False, True)
    ]


def plan_cuda(
    chosen: CudaChoices,
    logits: TensorType,
    valid_vocab_size: int,
    limits: Limits,
    target: CudaTarget,
    progress: Callable[[str], None] = lambda text: None,
) -> CudaPlan:
    """Compile every kernel the chosen tactics use, and write down the launches.

    Args:
        logits: type of the logits, [R, V].
        valid_vocab_size: ids the tokenizer knows; larger ones are never sampled.
    """
    receive, samplings = _around(logits, valid_vocab_size, limits)
    specs = kernels_to_compile(chosen, logits, valid_vocab_size, limits)
    compiled = compile_all(specs, target.sm, progress=of_kernels(progress))
    kernels = KernelTable({s.key(): kernel for s, kernel in zip(specs, compiled, strict=True)})
    ranges, decode_ranges = (
        {key: tuple(kernels.range_launches(c) for c in row) for key, row in kind.items()}
        for kind in (chosen.mixed, chosen.decode)
    )
    sample, sample_full = (
        tuple(
            RangeLaunches(rows, "", size, kernels.launches(around)) for rows, (around, size) in kind.items()
        )
        for kind in samplings
    )
    receiving = kernels.launch(receive)
    ranged = (*ranges.values(), *decode_ranges.values(), sample, sample_full)
    everything = [r for row in ranged for r in row]
    table = LaunchTable(
        sm=target.sm,
        kernels=tuple(kernels.table),  # complete: every launch has been numbered above
        ranges=ranges,
        decode_ranges=decode_ranges,
        row_buckets=buckets(limits.max_num_tokens),
        logit_buckets=buckets(limits.max_batch_size),
        workspace_bytes=_aligned(max(r.workspace_bytes for r in everything)),
        scratch_bytes=max(kernels.scratch_bytes(r) for r in everything),
        receive=(receiving,),
        sample=sample,
        sample_full=sample_full,
    )
    return CudaPlan(table, kernels.cubins)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


def suited_tactics(tactics: Sequence[CudaTactic], rows: int) -> list[CudaTactic]:
    """Those that are not hopeless at `rows`, if any."""
    return [t for t in tactics if not t.max_rows or rows <= t.max_rows] or list(tactics)


def _total_us(signature: OpSignature, sizes: Sequence[int], target: CudaTarget, tactic: CudaTactic) -> float:
    return sum(tactic.expected_us(signature, rows, target) for rows in sizes)


def chosen_at(signature: OpSignature, usable: Sequence[CudaTactic], rows: int, target: CudaTarget) -> Chosen:
    """The tactic expected to be fastest at `rows`."""
    tactic = min(suited_tactics(usable, rows), key=lambda t: t.expected_us(signature, rows, target))
    return Chosen(
        rows,
        tactic,
        tactic.launches(signature, rows, target),
        tactic.workspace_bytes(signature, rows, target),
    )


def merge_ranges(row: Sequence[Chosen]) -> tuple[Chosen, ...]:
    """Neighbouring buckets with the same launches become one range, with the larger one's workspace."""
    merged: list[Chosen] = []
    for item in row:
        if merged and (merged[-1].tactic.name, merged[-1].launches) == (item.tactic.name, item.launches):
            item = replace(item, workspace_bytes=max(item.workspace_bytes, merged.pop().workspace_bytes))
        merged.append(item)
    return tuple(merged)


class KernelTable:
    """Numbers compiled kernels and names their cubins by content."""

    def __init__(self, compiled: Mapping[str, CompiledKernel]) -> None:
        self._compiled = compiled
        self._index: dict[str, int] = {}
        self.table: list[Kernel] = []
        self.cubins: dict[str, bytes] = {}

    def launches(self, specs: Sequence[Launchable]) -> tuple[Launch | Matmul, ...]:
        return tuple(_matmul(s) if isinstance(s, MatmulSpec) else self.launch(s) for s in specs)

    def range_launches(self, chosen: Chosen) -> RangeLaunches:
        return RangeLaunches(
            chosen.rows, chosen.tactic.name, chosen.workspace_bytes, self.launches(chosen.launches)
        )

    def launch(self, spec: LaunchSpec) -> Launch:
        grid = tuple(Grid(d.per_block, d.times) for d in spec.grid)
        return Launch(self.number(spec.kernel.key()), grid, _arguments(spec))

    def number(self, key: str) -> int:
        if key not in self._index:
            kernel = self._compiled[key]
            blob = f"{hashlib.sha256(kernel.cubin).hexdigest()[:24]}.cubin"
            self.cubins[blob] = kernel.cubin
            self._index[key] = len(self.table)
            self.table.append(
                Kernel(
                    blob,
                    kernel.symbol,
                    kernel.threads,
                    kernel.shared_bytes,
                    kernel.scratch_bytes,
                    kernel.num_scratch,
                    kernel.overlap,
                    kernel.cluster,
                    kernel.prefers_l1,
                )
            )
        return self._index[key]

    def scratch_bytes(self, range_: RangeLaunches) -> int:
        """The largest scratch a launch of the range wants: per block, times its blocks."""
        return max(
            (
                self.table[launch.kernel].blocks(math.prod(d.blocks(range_.max_rows) for d in launch.grid))
                * self.table[launch.kernel].scratch_bytes
                for launch in range_.launches
                if isinstance(launch, Launch)
            ),
            default=0,
        )


def _arguments(spec: Launchable) -> tuple[KernelArg, ...]:
    return tuple(KernelArg(a.kind, a.index, a.name, a.value) for a in spec.args)


def _matmul(spec: MatmulSpec) -> Matmul:
    data, version = (spec.algorithm.data, spec.algorithm.version) if spec.algorithm else ("", 0)
    return Matmul(
        spec.dtype, spec.n, spec.k, spec.bias, spec.addend, _arguments(spec), spec.workspace_bytes, data,
        version,
    )  # fmt: skip
