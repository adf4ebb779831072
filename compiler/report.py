"""What a build has to say about itself.

The engine holds only what depends on the model, the options and the choices made; times, paths
and memory depend on the host and stand here, in `FILE.report.json` beside the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.files import write_text

if TYPE_CHECKING:  # `tapeout --help` imports this module and must not load the runtime
    from tapeout.runtime.engine.manifest import Limits, RegionTime

REPORT_VERSION = 1
#: How a tactic was chosen; see `TacticTiming.chosen`.
ALONE, IN_A_STEP, DEFAULT = "alone", "in a step", ""


def report_path(engine: Path) -> Path:
    """Where the report of an engine lies: `m.engine` -> `m.engine.report.json`."""
    return engine.with_name(engine.name + ".report.json")


def write_report(report: BuildReport, path: Path) -> None:
    """Write the report as JSON; `path` holds the old or the new one, never half of one."""
    write_text(path, report.text())


@dataclass(frozen=True)
class TacticTiming:
    """The choice for one op signature at one anchor row count.

    Attributes:
        signature: `OpSignature.key()`.
        rows: the anchor T (or R) that was timed.
        tactic: the winner.
        time_us: the winner's time, None when nothing was timed.
        losers: other valid tactics and their times in microseconds.
        rejected: tactics that could not run or gave wrong results, with the reason.
        cached: the figures come from the timing cache.
        kind: of the step, on a GPU: `mixed` or `decode` (every sequence has one row).
        chosen: by its time `alone`, by that of a whole step (`in a step`), or "" as the default.
    """

    signature: str
    rows: int
    tactic: str
    time_us: float | None
    losers: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False
    kind: str = "mixed"
    chosen: str = ALONE


@dataclass(frozen=True)
class StepTiming:
    """A few layers timed as a whole on a GPU, at one bucket.

    Attributes:
        kind: `mixed` or `decode`. rows: padded rows of the bucket.
        time_us: of the fastest plan; None where the step could not be timed.
        alone_us: of the plan of those that are fastest alone.
        changed: ops of that plan that have another tactic in the fastest one. ops: all of them.
        reason: why it could not be timed.
    """

    kind: str
    rows: int
    time_us: float | None
    alone_us: float | None = None
    changed: int = 0
    ops: int = 0
    reason: str | None = None

    def text(self) -> str:
        """A line for people."""
        title = f"step of {self.rows} row{'' if self.rows == 1 else 's'}, {self.kind}"
        if self.time_us is None:
            return f"{title}: not timed: {self.reason}"
        if not self.changed:
            return f"{title}: {self.time_us:.1f} us with the fastest alone, which stay"
        gain = 1 - self.time_us / self.alone_us if self.alone_us else 0.0
        return (
            f"{title}: {self.alone_us:.1f} us with the fastest alone, {self.time_us:.1f} us ({gain:.1%} "
            f"less) with others for {self.changed} of {self.ops} ops"
        )


@dataclass(frozen=True)
class SegmentReport:
    """What a segment took to build, for the report.

    Attributes:
        blob: its name in the engine. regions: that it serves. ops: of one of them.
        onnx_bytes, plan_bytes: its two forms. seconds: of its builder.
    """

    blob: str
    regions: int
    ops: tuple[str, ...]
    onnx_bytes: int
    plan_bytes: int
    seconds: float


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes the engine needs at run time at its limits.

    `kv_cache_bytes` serves `max_batch_size` requests of `max_seq_len` tokens at once; a smaller
    pool works too, with fewer or shorter requests in flight.
    """

    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int = 0  # of GPU tactics, beside the arena; in a dry run without their kernels' scratch

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.workspace_bytes

    def advice(self) -> str:
        """Which limit to lower, for the largest of the four."""
        activations = max(self.arena_bytes, self.workspace_bytes)
        largest = max(self.weights_bytes, activations, self.kv_cache_bytes)
        if largest == self.kv_cache_bytes:
            return "the KV cache is largest: lower --max-seq-len or --max-batch-size"
        if largest == activations:
            name = "arena" if activations == self.arena_bytes else "workspace"
            return f"the {name} is largest: lower --max-num-tokens"
        return "the weights are largest: choose a smaller --dtype or --quantize int8-dynamic"


@dataclass(frozen=True)
class BuildReport:
    """What was built, how long it took and what was chosen.

    Attributes:
        engine: the engine file; with `dry_run` the file that would be written.
        dry_run: nothing was written.
        target, dtype, quantize: as resolved, for example `cpu:x86_64_v3`.
        limits: as resolved.
        memory: bytes at run time.
        file_bytes: file name to size, for every file written (or to be written).
        section_bytes: engine section (`weights`, `text`, `program`, `kernels`) to size.
        stage_seconds: stage name to wall seconds, in order.
        peak_memory_bytes: peak resident memory of the process.
        passes: pass name to match count.
        tactics: the choice at each anchor.
        timed: False when tactics were chosen without times.
        steps: what was timed as a whole, on a GPU.
        parity: verdict, cases, tolerance and figures of the comparison with HF.
        options: `BuildOptions.effective()`.
        warnings: what the user should know, one line each.
        segments: of TensorRT's, what each took to build.
        regions: what they competed for: who runs each at each bucket, and what was measured.
    """

    engine: Path
    dry_run: bool
    target: str
    dtype: str
    quantize: str
    limits: Limits
    memory: MemoryPlan
    file_bytes: Mapping[str, int]
    section_bytes: Mapping[str, int]
    stage_seconds: Mapping[str, float]
    peak_memory_bytes: int
    passes: Mapping[str, int]
    tactics: tuple[TacticTiming, ...]
    timed: bool
    parity: Mapping[str, Any]
    options: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    segments: tuple[SegmentReport, ...] = ()
    regions: tuple[RegionTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `--json` prints and the report file holds."""
        data = asdict(self)
        data["engine"] = str(self.engine)
        data["memory"]["total_bytes"] = self.memory.total_bytes
        return {"report_version": REPORT_VERSION, **json.loads(json.dumps(data))}

    def text(self) -> str:
        """`to_json` as the text of the report file."""
        return json.dumps(self.to_json(), indent=2) + "\n"
