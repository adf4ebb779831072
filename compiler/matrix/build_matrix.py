"""`tapeout build --matrix`: every engine a file asks for, those that changed, in processes of their own."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tapeout.compiler.files import write_text
from tapeout.compiler.matrix.content_key import TIMINGS, factors_of, key_of
from tapeout.compiler.matrix.engine_set import EngineSet
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.job import ENGINE, PACK, Event
from tapeout.compiler.matrix.machine import available_bytes
from tapeout.compiler.matrix.plan import (
    Planned,
    jobs_of,
    note_path,
    pack_note,
    plan_engine,
    plan_pack,
    select,
    with_timings,
)
from tapeout.compiler.matrix.processes import WORKER, run_jobs
from tapeout.compiler.matrix.results import (
    BUILT,
    FAILED,
    JUNIT,
    KEPT,
    LEFT,
    PLANNED,
    SUMMARY,
    EngineResult,
    MatrixReport,
)
from tapeout.compiler.matrix.schema import PACKS, EngineSpec, load_matrix
from tapeout.compiler.matrix.schema import TIMINGS as TIMINGS_FOLDER
from tapeout.compiler.progress import Progress, SilentProgress
from tapeout.plugins.errors import TapeoutError, UsageError

COMPILE, FINISH = "compile", "finish"
STAGES = (COMPILE, FINISH)
_LOCK = ".matrix.lock"
_MEMORY_SHARE = 0.9  # of what is free; the rest is for what the estimates miss


@dataclass(frozen=True)
class MatrixRequest:
    """What to do with a matrix.

    Attributes:
        matrix: the YAML file. output: the directory of all sets.
        stage: COMPILE writes packs for GPUs whose timings are not there, FINISH builds engines.
        timings: directory of timing caches, `<model>/<engine>.json`; None for `timings` below the output.
        only: patterns of engines' titles; none means all.
        flags: options given as flags, over all that the file says.
        workers: build processes at once; None for one a core.
        memory_bytes: that they may be expected to take; None for most of what is free.
        dry_run: write nothing, say what would be made.
    """

    matrix: Path
    output: Path
    stage: str = FINISH
    timings: Path | None = None
    only: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    memory_bytes: int | None = None
    dry_run: bool = False


def build_matrix(
    request: MatrixRequest, progress: Progress | None = None, *, worker: Sequence[str] = WORKER
) -> MatrixReport:
    """Make what is missing or has changed. An engine that fails does not stop the others.

    The summaries `summary.md` and `junit.xml` and each model's `index.json` are written whatever happens,
    also when the run is interrupted.

    Args:
        worker: the command of a build process (tests).

    Raises:
        UsageError: the file, a selection or a directory is wrong; nothing was begun.
        KeyboardInterrupt: what was done is there, and no half of anything.
    """
    start = time.perf_counter()
    progress = progress or SilentProgress()
    specs = _specs(request)
    if request.dry_run:
        run = _Run(request, specs, FileDigests(), progress)
        return run.report(time.perf_counter() - start)
    _make_directories(request, specs)
    with _only_run(request.output):
        digests = FileDigests()
        run = _Run(request, [_with_timings(request, s) for s in specs], digests, progress)
        try:
            run.work(worker)
        finally:
            digests.save()
            report = run.report(time.perf_counter() - start)
            write_text(request.output / SUMMARY, report.markdown())
            write_text(request.output / JUNIT, report.junit())
    return report


@dataclass(frozen=True)
class ExplainedKey:
    """An engine's content key and what it is made of; `key` is None until a build has told its ops."""

    title: str
    key: str | None
    factors: Mapping[str, str]


def explain_keys(request: MatrixRequest) -> list[ExplainedKey]:
    """The content keys of the engines a matrix asks for. Writes nothing.

    Raises TapeoutError: see `build_matrix`; also where a model is not there.
    """
    digests, explained = FileDigests(), []
    for spec in _specs(request):
        folder = EngineSet(request.output / spec.model, spec.model, digests)
        factors: dict[str, str] = factors_of(spec, digests)
        # The timings that count are told by the ops, and those by an engine of the same factors.
        if folder.made_with(spec, factors):
            factors = folder.key(spec, factors)
        explained.append(ExplainedKey(spec.title, key_of(factors) if TIMINGS in factors else None, factors))
    digests.save()
    return explained


class _Run:
    """One run: what is planned, and what became of it."""

    def __init__(
        self, request: MatrixRequest, specs: Sequence[EngineSpec], digests: FileDigests, progress: Progress
    ) -> None:
        self._request, self._digests, self._progress = request, digests, progress
        self._sets = {s.model: EngineSet(request.output / s.model, s.model, digests) for s in specs}
        packs = request.output / PACKS
        self._planned = {
            spec.title: plan_pack(spec, packs, digests)
            if request.stage == COMPILE
            else plan_engine(spec, self._sets[spec.model], digests)
            for spec in specs
        }
        self._results = {title: self._at_first(planned) for title, planned in self._planned.items()}
        self._warnings = [
            f"{folder.folder / 'index.json'} cannot be read and is made anew: {folder.unreadable}"
            for folder in self._sets.values()
            if folder.unreadable
        ]

    def work(self, worker: Sequence[str]) -> None:
        """Make what is to be made, and list it."""
        todo = [p for p in self._planned.values() if p.why is not None and p.error is None]
        for title, result in self._results.items():
            if result.status != PLANNED:
                self._progress.info(f"{title}: {result.message or result.told()}")
        cores = len(os.sched_getaffinity(0))
        workers = self._request.workers or cores
        with tempfile.TemporaryDirectory(prefix="tapeout-") as folder:
            lock = Path(folder) / "machine.lock"
            kind = PACK if self._request.stage == COMPILE else ENGINE
            count = len(jobs_of(todo, lock, 1, kind))
            share = max(1, cores // max(1, min(workers, count)))
            memory_bytes = self._request.memory_bytes or int(available_bytes() * _MEMORY_SHARE)
            jobs = jobs_of(todo, lock, share, kind)
            run_jobs(jobs, workers=workers, memory_bytes=memory_bytes, listen=self._listen, command=worker)
        if self._request.stage == FINISH:
            for engines in self._sets.values():
                engines.remove_old_weights()

    def report(self, seconds: float) -> MatrixReport:
        results = []
        for result in self._results.values():
            unfinished = result.status == PLANNED and not self._request.dry_run
            results.append(replace(result, status=LEFT) if unfinished else result)
        warnings = [f"{r.title}: {text}" for r in results for text in self._worth_telling(r)]
        return MatrixReport(
            self._request.output, self._request.stage, tuple(results), seconds, (*self._warnings, *warnings)
        )

    def _worth_telling(self, result: EngineResult) -> list[str]:
        """The build's warnings. That an engine's own timing cache does not serve it is none while there is
        no such file: that nothing was timed is told anyway."""
        cache = self._planned[result.title].spec.options.timing_cache
        absent = f"timing cache {cache} " if cache is not None and not cache.exists() else "\0"
        return [text for text in result.details.get("warnings", ()) if not text.startswith(absent)]

    def _at_first(self, planned: Planned) -> EngineResult:
        spec = planned.spec
        result = EngineResult(
            spec.model, spec.name, spec.options.target, PLANNED, planned.why or "", planned.output
        )
        if planned.error is not None:
            return _failed(result, planned.error)
        if planned.why is not None:
            return result
        result = replace(result, status=KEPT, why=planned.stays)
        entry = self._sets[spec.model].entry(spec.file) if self._request.stage == FINISH else None
        if entry is None:
            return result
        return replace(
            result,
            size_bytes=entry.size_bytes,
            sha256=entry.sha256,
            key=entry.content_key,
            details={"timed": entry.timed, "dtype": entry.dtype, "quantize": entry.quantize},
        )

    def _listen(self, event: Event) -> None:
        result, planned = self._results[event.title], self._planned[event.title]
        if event.kind == "started":
            self._progress.info(f"{event.title}: begins ({result.why})")
        elif event.kind == "stage":
            self._progress.info(f"{event.title}: {event.text}")
        elif event.kind == "failed":
            error = TapeoutError(event.text, hint=event.hint)
            error.exit_code = event.exit_code
            self._end(replace(_failed(result, error), seconds=event.seconds))
        elif event.kind == "done":
            result = replace(
                result,
                seconds=event.seconds,
                peak_memory_bytes=event.peak_memory_bytes,
                details=event.details,
            )
            try:
                self._end(self._done(result, planned))
            except TapeoutError as error:
                self._end(_failed(result, error))

    def _done(self, result: EngineResult, planned: Planned) -> EngineResult:
        """List what was made."""
        if self._request.stage == COMPILE:
            write_text(note_path(planned.output), pack_note(planned, self._digests))
            if not planned.output.exists():
                return replace(result, status=KEPT, why="its timing cache answers everything")
            size = planned.output.stat().st_size
            return replace(result, status=BUILT, size_bytes=size, sha256=self._digests.sha256(planned.output))
        entry = self._sets[planned.spec.model].add(planned.spec, planned.factors)
        return replace(
            result, status=BUILT, size_bytes=entry.size_bytes, sha256=entry.sha256, key=entry.content_key
        )

    def _end(self, result: EngineResult) -> None:
        self._results[result.title] = result
        left = sum(r.status == PLANNED for r in self._results.values())
        told = f"failed: {result.message}" if result.status == FAILED else result.told()
        self._progress.info(f"{result.title}: {told}, {result.seconds:.1f} s, {left} left")


def _failed(result: EngineResult, error: TapeoutError) -> EngineResult:
    return replace(result, status=FAILED, message=error.message, hint=error.hint, exit_code=error.exit_code)


def _specs(request: MatrixRequest) -> list[EngineSpec]:
    """The selected engines, each with its timing cache where that is there to be read."""
    specs = select(load_matrix(request.matrix, request.flags), request.only)
    if request.timings is not None and not request.timings.is_dir():
        raise UsageError(
            f"--timings: {str(request.timings)!r} is no directory, expected one of timing caches, "
            "<model>/<engine>.json",
            hint=f"mkdir -p {request.timings}",
        )
    there = [(s, _timings_folder(request) / s.model) for s in specs]
    return [_with_timings(request, spec) if folder.is_dir() else spec for spec, folder in there]


def _timings_folder(request: MatrixRequest) -> Path:
    return request.timings or request.output / TIMINGS_FOLDER


def _with_timings(request: MatrixRequest, spec: EngineSpec) -> EngineSpec:
    return with_timings(spec, _timings_folder(request))


def _make_directories(request: MatrixRequest, specs: Sequence[EngineSpec]) -> None:
    try:
        for spec in specs:
            below = request.output / PACKS if request.stage == COMPILE else request.output
            (below / spec.model).mkdir(parents=True, exist_ok=True)
            (_timings_folder(request) / spec.model).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output: {str(request.output)!r} cannot be a directory of engines: {error.strerror or error}",
            hint="name a directory that may be written, or none yet",
        ) from None


@contextmanager
def _only_run(output: Path) -> Iterator[None]:
    """Refuse a second run in the same directory: both would build the same."""
    try:
        file = (output / _LOCK).open("a")
    except OSError as error:
        raise UsageError(f"--output: {str(output)!r} cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--output: another run is building in {str(output)!r}", hint="wait for it, or stop it"
            ) from None
        yield
