"""What a matrix run has to do, and why: engines or packs that are to be made, and those that may stay."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tapeout.compiler.limits import target_kind
from tapeout.compiler.matrix.content_key import factors_of, key_of, pack_factors
from tapeout.compiler.matrix.engine_set import EngineSet
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.job import ENGINE, PACK, Job, Task
from tapeout.compiler.matrix.processes import Estimated
from tapeout.compiler.matrix.schema import EngineSpec
from tapeout.compiler.report import report_path
from tapeout.compiler.tensorrt.choice import check_segments
from tapeout.model_defs.resolve import locate_model
from tapeout.plugins.errors import TapeoutError, UnsupportedError, UsageError

PACK_SUFFIX = ".pack"
_BASE_BYTES = 1 << 30  # a process that has imported torch and traced a model
_KERNEL_WORKER_BYTES = 300 << 20
_GGUF_GROWTH = 7  # four bits a weight become float32


@dataclass(frozen=True)
class Planned:
    """One engine of the matrix in this run.

    Attributes:
        output: the file that would be made: the engine or its pack.
        why: it must be made; None when it may stay.
        stays: why nothing is to be made.
        factors: of its content key, without the timings. error: why there are none.
    """

    spec: EngineSpec
    output: Path
    why: str | None
    stays: str = ""
    factors: Mapping[str, str] = field(default_factory=dict)
    error: TapeoutError | None = None


def select(specs: Sequence[EngineSpec], only: Sequence[str]) -> tuple[EngineSpec, ...]:
    """The engines whose titles match a pattern: `smollm2/h200`, `smollm2/*`, `*/cpu`.

    Raises UsageError for patterns that match none, all of them listed.
    """
    if not only:
        return tuple(specs)
    hits = {pattern: [s for s in specs if fnmatch.fnmatchcase(s.title, pattern)] for pattern in only}
    if empty := [pattern for pattern, found in hits.items() if not found]:
        raise UsageError(
            f"--only: no engine is called {', '.join(map(repr, empty))}",
            hint=f"the matrix asks for {', '.join(s.title for s in specs)}",
        )
    return tuple(s for s in specs if any(s in found for found in hits.values()))


def with_timings(spec: EngineSpec, timings: Path) -> EngineSpec:
    """The engine with the timing cache that is its own, unless its options name one."""
    if spec.options.timing_cache is not None:
        return spec
    return replace(
        spec, options=replace(spec.options, timing_cache=timings / spec.model / f"{spec.name}.json")
    )


def plan_engine(spec: EngineSpec, engines: EngineSet, digests: FileDigests) -> Planned:
    """Whether the engine must be built."""
    output = engines.folder / spec.file
    try:
        factors = factors_of(spec, digests)
        why = engines.stale(spec, factors)
    except TapeoutError as error:
        return Planned(spec, output, "", error=error)
    return Planned(spec, output, why, "unchanged", factors)


def plan_pack(spec: EngineSpec, folder: Path, digests: FileDigests) -> Planned:
    """Whether a pack must be made: not for a CPU, and not when nothing changed since the last one."""
    output = folder / spec.model / f"{spec.name}{PACK_SUFFIX}"
    if target_kind(spec.options) != "cuda":
        return Planned(spec, output, None, "a CPU is timed where the engine is finished")
    try:
        check_segments(spec.options)
    except UnsupportedError as error:  # a machine with the GPU builds them
        return Planned(spec, output, None, error.message)
    try:
        factors = {
            **factors_of(spec, digests),
            **pack_factors(spec.options),
            "timings.file": _file_digest(spec, digests),
        }
    except TapeoutError as error:
        return Planned(spec, output, "", error=error)
    noted = _noted(output)
    if noted.get("key") != key_of(factors):
        return Planned(
            spec,
            output,
            "packed before, but something changed" if noted else "there was no pack yet",
            "",
            factors,
        )
    if noted.get("sha256") is None:
        return Planned(spec, output, None, "its timing cache answers everything", factors)
    if not output.is_file() or digests.sha256(output) != noted["sha256"]:
        return Planned(spec, output, "the pack is missing or damaged", "", factors)
    return Planned(spec, output, None, "unchanged", factors)


def pack_note(planned: Planned, digests: FileDigests) -> str:
    """What is noted beside a pack that was just made, for the next run."""
    sha256 = digests.sha256(planned.output) if planned.output.exists() else None
    data = {"key": key_of(planned.factors), "sha256": sha256, "factors": dict(planned.factors)}
    return json.dumps(data, indent=1) + "\n"


def note_path(pack: Path) -> Path:
    return pack.with_name(pack.name + ".key.json")


def jobs_of(planned: Sequence[Planned], lock: Path, kernel_workers: int, stage: str) -> list[Estimated]:
    """One job for each model and precision; engines for CPUs first, which need the machine alone."""
    groups: dict[tuple[object, ...], list[Planned]] = {}
    for item in planned:
        options = item.spec.options
        key = (item.spec.source, options.revision, options.trust_remote_code, options.dtype)
        groups.setdefault(key, []).append(item)
    jobs = []
    for items in groups.values():
        items.sort(key=lambda item: target_kind(item.spec.options) == "cuda")
        tasks = tuple(_task(item, stage) for item in items)
        job = Job(items[0].spec.source, tasks, lock, kernel_workers)
        jobs.append(Estimated(job, max(map(_estimated_bytes, items)) + kernel_workers * _KERNEL_WORKER_BYTES))
    return jobs


def _task(item: Planned, stage: str) -> Task:
    options = item.spec.options
    if stage == PACK:
        # What is to be timed is not timed yet.
        options = replace(options, pack=item.output, require_timed=False)
        return Task(item.spec.title, PACK, item.output, options)
    return Task(item.spec.title, ENGINE, item.output, options)


def _estimated_bytes(item: Planned) -> int:
    """Peak memory of a build: what the last one took, else about what such a model takes."""
    try:
        report = json.loads(report_path(item.output).read_bytes())
        return int(report["peak_memory_bytes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    try:
        path = locate_model(item.spec.source, revision=item.spec.options.revision)
        if path.is_file():
            weights = path.stat().st_size * _GGUF_GROWTH
        else:
            weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    except (TapeoutError, OSError):
        return _BASE_BYTES
    # On a CPU tactics hold weights in layouts of their own; elsewhere the largest few are there at once.
    return _BASE_BYTES + (weights if target_kind(item.spec.options) == "cpu" else weights // 4)


def _file_digest(spec: EngineSpec, digests: FileDigests) -> str:
    cache = spec.options.timing_cache
    return digests.sha256(cache) if cache is not None and cache.exists() else "none"


def _noted(pack: Path) -> dict[str, object]:
    try:
        data = json.loads(note_path(pack).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
