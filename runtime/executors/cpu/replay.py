"""Binding a program to tensors: one list of closures per bucket, replayed every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic, StepState
from tapeout.plugins.errors import EngineIncompatibleError, UnsupportedError
from tapeout.plugins.registry import cpu_tactics
from tapeout.runtime.engine.program import STEP_INPUTS, Program, Record, TacticRange, View
from tapeout.runtime.engine.program_check import resolve_shape
from tapeout.runtime.engine.reader import Engine
from tapeout.runtime.executors.cpu.weight_store import WeightStore


@dataclass(frozen=True)
class Bucket:
    """A program bound to exactly T rows and R logit rows."""

    calls: Sequence[Callable[[], None]]
    logits: torch.Tensor  # [R, vocab]


class Replay:
    """Chooses tactics, binds buckets and keeps the `max_buckets` used last."""

    def __init__(
        self,
        program: Program,
        arena: torch.Tensor,
        step: StepState,
        weights: WeightStore,
        kernels: Any,
        max_buckets: int,
    ) -> None:
        self._program, self._arena, self._step = program, arena, step
        self._weights, self._kernels, self._max_buckets = weights, kernels, max_buckets
        self._buffers = {b.name: b for b in program.buffers}
        self._tactics = find_tactics(program)
        self._buckets: OrderedDict[tuple[int, int], Bucket] = OrderedDict()

    def prepare_weights(self) -> None:
        """Run `prepare` of every tactic some range chose, once per set of weights."""
        for record in self._program.records:
            for choice in self._program.tactics[record.signature]:
                self._weights.prepared(self._tactics[record.op, choice.tactic], record)

    def with_weights_of(self, engine: Engine) -> Replay:
        """The same program over another engine's weights, prepared as these are."""
        weights = WeightStore(engine, release=self._weights.release)
        replay = Replay(self._program, self._arena, self._step, weights, self._kernels, self._max_buckets)
        if not weights.release:
            replay.prepare_weights()
        return replay

    def bucket(self, t: int, r: int) -> Bucket:
        """The program for T and R, bound now if it is not at hand."""
        key = (t, r)
        if key in self._buckets:
            self._buckets.move_to_end(key)
            return self._buckets[key]
        bucket = self._bind({"T": t, "R": r})
        self._buckets[key] = bucket
        if len(self._buckets) > self._max_buckets:
            self._buckets.popitem(last=False)
        return bucket

    def _bind(self, rows: Mapping[str, int]) -> Bucket:
        calls = []
        for record in self._program.records:
            count = record_rows(record, rows)
            if count == 0:  # a step that samples nothing has no logit rows to compute
                continue
            choice = choose(self._program.tactics[record.signature], count)
            tactic = self._tactics[record.op, choice.tactic]
            bind = self._bind_late if self._weights.release else self._bind_record
            calls.append(bind(record, tactic, rows))
        return Bucket(calls, self._tensor(self._program.logits, rows))

    def _bind_record(self, record: Record, tactic: CpuTactic, rows: Mapping[str, int]) -> Callable[[], None]:
        call = BoundCall(
            inputs=[self._tensor(v, rows) for v in record.inputs],
            weights=self._weights.prepared(tactic, record),
            outputs=[self._tensor(v, rows) for v in record.outputs],
            attrs=record.attrs,
            step=self._step,
            kernels=self._kernels,
        )
        return tactic.bind(call)

    def _bind_late(self, record: Record, tactic: CpuTactic, rows: Mapping[str, int]) -> Callable[[], None]:
        """For little memory: prepare, bind, run and let go, one record after the other."""

        def run() -> None:
            self._bind_record(record, tactic, rows)()
            self._weights.release_after(record)

        return run

    def _tensor(self, view: View, rows: Mapping[str, int]) -> torch.Tensor:
        shape = resolve_shape(view.shape, rows)
        if view.buffer in STEP_INPUTS:
            base: torch.Tensor = getattr(self._step, view.buffer)
        else:
            buffer = self._buffers[view.buffer]
            data = self._arena[buffer.offset_bytes : buffer.offset_bytes + buffer.size_bytes]
            base = data.view(getattr(torch, view.dtype))
        return base.as_strided(shape, view.strides, base.storage_offset() + view.offset)


def record_rows(record: Record, rows: Mapping[str, int]) -> int:
    """Rows of the record's output: what selects its tactic. 1 when no dim is symbolic."""
    return next((rows[d] for view in record.outputs for d in view.shape if isinstance(d, str)), 1)


def choose(ranges: Sequence[TacticRange], count: int) -> TacticRange:
    """The range that serves `count` rows; ranges ascend and the last covers the engine's limit."""
    return next(r for r in ranges if count <= r.max_rows)


def find_tactics(program: Program) -> dict[tuple[str, str], CpuTactic]:
    """Every tactic the program names, by (op, name). Raises EngineIncompatibleError with all it lacks."""
    found: dict[tuple[str, str], CpuTactic] = {}
    missing: set[str] = set()
    for record in program.records:
        for choice in program.tactics[record.signature]:
            try:
                match = next((t for t in cpu_tactics(record.op) if t.name == choice.tactic), None)
            except UnsupportedError:
                match = None
            if match is None:
                missing.add(f"{record.op}/{choice.tactic}")
            else:
                found[record.op, choice.tactic] = match
    if missing:
        raise EngineIncompatibleError(
            f"the engine uses tactics this tapeout does not have: {', '.join(sorted(missing))}",
            hint="rebuild it with this version: tapeout build MODEL -o FILE",
        )
    return found
