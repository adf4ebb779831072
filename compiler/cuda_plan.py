"""From chosen CUDA tactics to what an engine stores: cubins and the launch table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tapeout.compiler.plan import max_rows
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import CudaTactic, CudaTarget, LaunchSpec
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.sample.cuda import fill_launch, sample_launches, sample_workspace_bytes
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
    signatures: Mapping[str, OpSignature],
    logits: TensorType,
    valid_vocab_size: int,
    limits: Limits,
    target: CudaTarget,
) -> CudaPlan:
    """Choose default tactics, compile every kernel they use, and write down the launches.

    Args:
        logits: type of the logits, [R, V].
        valid_vocab_size: ids the tokenizer knows; larger ones are never sampled.

    Raises:
        UnsupportedError: ops that no tactic can run on the target, all of them listed.
    """
    chosen = _choose(signatures, limits, target)
    fill = (fill_launch(),)
    sample = {
        rows: (sample_launches(logits, rows, valid_vocab_size), sample_workspace_bytes(logits, rows))
        for rows in buckets(limits.max_batch_size)
    }
    specs = [
        launch.kernel
        for launches in (
            fill,
            *(launches for launches, _ in sample.values()),
            *(c.launches for row in chosen.values() for c in row),
        )
        for launch in launches
    ]
    kernels = _Kernels(dict(zip((s.key() for s in specs), compile_all(specs, target.sm), strict=True)))
    merged = {key: _merge(row) for key, row in chosen.items()}
    ranges = {
        key: tuple(RangeLaunches(c.rows, c.workspace_bytes, kernels.launches(c.launches)) for c in row)
        for key, row in merged.items()
    }
    sampling = tuple(
        RangeLaunches(rows, size, kernels.launches(specs)) for rows, (specs, size) in sample.items()
    )
    filling = kernels.launches(fill)
    everything = [*(r for row in ranges.values() for r in row), *sampling]
    table = LaunchTable(
        kernels=tuple(kernels.table),  # complete: every launch has been numbered above
        ranges=ranges,
        row_buckets=buckets(limits.max_num_tokens),
        logit_buckets=buckets(limits.max_batch_size),
        workspace_bytes=_aligned(max(r.workspace_bytes for r in everything)),
        scratch_bytes=max(kernels.scratch_bytes(r) for r in everything),
        fill=filling,
        sample=sampling,
    )
    tactics = {key: tuple(TacticRange(c.rows, c.tactic.name) for c in row) for key, row in merged.items()}
    return CudaPlan(tactics, table, kernels.cubins)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // 256) * 256


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
        if reason is None and tactic.decode_only:
            reason = "buckets hold prefill and decode rows alike"
        if reason is None:
            usable.append(tactic)
        else:
            reasons[tactic.name] = reason
    suited = [t for t in usable if not t.max_rows or rows <= t.max_rows]
    best = min(suited or usable, key=lambda t: t.expected_us(signature, rows, target), default=None)
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

    def __init__(self, compiled: Mapping[str, CompiledKernel]) -> None:
        self._compiled = compiled
        self._index: dict[str, int] = {}
        self.table: list[Kernel] = []
        self.cubins: dict[str, bytes] = {}

    def launches(self, specs: tuple[LaunchSpec, ...]) -> tuple[Launch, ...]:
        return tuple(self._launch(spec) for spec in specs)

    def _launch(self, spec: LaunchSpec) -> Launch:
        grid = tuple(Grid(d.per_block, d.times) for d in spec.grid)
        args = tuple(KernelArg(a.kind, a.index, a.name, a.value) for a in spec.args)
        return Launch(self._number(spec.kernel.key()), grid, args)

    def _number(self, key: str) -> int:
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
                )
            )
        return self._index[key]

    def scratch_bytes(self, range_: RangeLaunches) -> int:
        """The largest scratch a launch of the range wants: per block, times its blocks."""
        return max(
            math.prod(d.blocks(range_.max_rows) for d in launch.grid)
            * self.table[launch.kernel].scratch_bytes
            for launch in range_.launches
        )
