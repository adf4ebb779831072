"""From chosen CUDA tactics to what an engine stores: cubins and the launch table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.compiler.plan import max_rows
from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.cuda import CudaTactic, CudaTarget, LaunchSpec
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.sample.cuda import step_launches
from tapeout.plugins.triton_aot import CompiledKernel, compile_all
from tapeout.runtime.engine.launches import Grid, Kernel, KernelArg, Launch, LaunchTable, RangeLaunches
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import TacticRange


@dataclass(frozen=True)
class CudaPlan:
    """Tactic ranges for the program, the launch table, and cubins by name."""

    ranges: Mapping[str, tuple[TacticRange, ...]]
    table: LaunchTable
    cubins: Mapping[str, bytes]


@dataclass(frozen=True)
class _Chosen:
    """A tactic's launches at one bucket size."""

    rows: int
    tactic: CudaTactic
    launches: tuple[LaunchSpec, ...]
    workspace_bytes: int


def buckets(most: int) -> tuple[int, ...]:
    """Padded row counts that are captured: powers of two, and the limit."""
    return tuple(sorted({*(1 << i for i in range(most.bit_length())), most}))


def plan_cuda(
    signatures: Mapping[str, OpSignature], limits: Limits, target: CudaTarget, vocab_size: int, logits_dtype: str
) -> CudaPlan:
    """Choose default tactics, compile every kernel they use, and write down the launches.

    Raises:
        UnsupportedError: ops that no tactic can run on the target, all of them listed.
    """
    chosen = _choose(signatures, limits, target)
    step = step_launches(vocab_size, logits_dtype, limits.max_batch_size)
    specs = [l.kernel for row in chosen.values() for c in row for l in c.launches] + [l.kernel for l in step.values()]
    kernels = _Kernels(compile_all(specs, target.sm))
    ranges, launches = {}, {}
    for key, row in chosen.items():
        merged = _merge(row)
        ranges[key] = tuple(TacticRange(c.rows, c.tactic.name) for c in merged)
        launches[key] = tuple(
            RangeLaunches(c.rows, c.workspace_bytes, tuple(kernels.launch(l) for l in c.launches)) for c in merged
        )
    roles = {role: kernels.launch(l) for role, l in step.items()}
    tokens, logits = buckets(limits.max_num_tokens), buckets(limits.max_batch_size)
    table = LaunchTable(
        kernels=tuple(kernels.table),
        ranges=launches,
        row_buckets=tokens,
        logit_buckets=logits,
        workspace_bytes=max((c.workspace_bytes for row in chosen.values() for c in row), default=0),
        scratch_bytes=kernels.scratch_bytes(launches),
        step=roles,
    )
    return CudaPlan(ranges, table, kernels.cubins)


def _choose(
    signatures: Mapping[str, OpSignature], limits: Limits, target: CudaTarget
) -> dict[str, tuple[_Chosen, ...]]:
    chosen, missing = {}, []
    for key, signature in signatures.items():
        row = []
        for rows in buckets(max_rows(signature.outputs[0].shape, limits)):
            tactic, reasons = _default_tactic(signature, rows, target)
            if tactic is None:
                missing.append(f"{key}: {reasons}")
                break
            launches = tactic.launches(signature, rows, target)
            row.append(_Chosen(rows, tactic, launches, tactic.workspace_bytes(signature, rows, target)))
        chosen[key] = tuple(row)
    if missing:
        raise UnsupportedError("no CUDA tactic for these ops:\n  " + "\n  ".join(missing))
    return chosen


def _default_tactic(
    signature: OpSignature, rows: int, target: CudaTarget
) -> tuple[CudaTactic | None, dict[str, str]]:
    """The tactic expected to be fastest at `rows`; nothing is timed."""
    reasons, usable = {}, []
    for tactic in cuda_tactics(signature.op):
        reason = tactic.unsupported(signature, target)
        if reason is None:
            usable.append(tactic)
        else:
            reasons[tactic.name] = reason
    best = min(usable, key=lambda t: t.expected_us(signature, rows, target), default=None)
    return best, reasons


def _merge(row: tuple[_Chosen, ...]) -> list[_Chosen]:
    """Neighbouring buckets with the same launches become one range."""
    merged: list[_Chosen] = []
    for item in row:
        if merged and (merged[-1].tactic.name, merged[-1].launches) == (item.tactic.name, item.launches):
            merged.pop()
        merged.append(item)
    return merged


class _Kernels:
    """Numbers compiled kernels and names their cubins by content."""

    def __init__(self, compiled: Mapping[Any, CompiledKernel]) -> None:
        self._compiled = compiled
        self._index: dict[Any, int] = {}
        self.table: list[Kernel] = []
        self.cubins: dict[str, bytes] = {}

    def launch(self, spec: LaunchSpec) -> Launch:
        grid = tuple(Grid(d.per_block, d.times) for d in spec.grid)
        args = tuple(KernelArg(a.kind, a.index, a.name, a.value) for a in spec.args)
        return Launch(self._number(spec), grid, args)

    def _number(self, spec: LaunchSpec) -> int:
        key = spec.kernel.key()
        if key not in self._index:
            kernel = self._compiled[key]
            blob = f"{hashlib.sha256(kernel.cubin).hexdigest()[:24]}.cubin"
            self.cubins[blob] = kernel.cubin
            self._index[key] = len(self.table)
            self.table.append(
                Kernel(
                    blob, kernel.symbol, kernel.threads, kernel.shared_bytes, kernel.scratch_bytes, kernel.scratch_pointers
                )
            )
        return self._index[key]

    def scratch_bytes(self, launches: Mapping[str, tuple[RangeLaunches, ...]]) -> int:
        """The largest scratch a launch wants: per block, times its blocks at the range's bound."""
        most = 0
        for row in launches.values():
            for range_ in row:
                for launch in range_.launches:
                    blocks = 1
                    for dim in launch.grid:
                        blocks *= dim.blocks(range_.max_rows)
                    most = max(most, blocks * self.table[launch.kernel].scratch_bytes)
        return most
