"""Build processes: as many at once as workers and memory allow, watched from one loop."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tapeout.compiler.matrix.job import Event, Job, Task, parse_event
from tapeout.plugins.errors import CapacityError, TapeoutError

WORKER = (sys.executable, "-m", "tapeout.compiler.matrix.worker")
_GRACE_SECONDS = 20.0  # to clean up in, before a process is killed
_LOG_LINES = 20


@dataclass(frozen=True)
class Estimated:
    """A job and the memory it is expected to take at most."""

    job: Job
    memory_bytes: int


def run_jobs(
    jobs: Sequence[Estimated],
    *,
    workers: int,
    memory_bytes: int,
    listen: Callable[[Event], None],
    command: Sequence[str] = WORKER,
) -> None:
    """Run all jobs to their end; every task ends in one event `done` or `failed`.

    A job that is expected to take more than all memory runs alone. When a process dies, the task it was
    at has failed and another process does the rest.

    Args:
        workers: processes at once. memory_bytes: that all of them may be expected to take.
        command: what is run (tests).

    Raises:
        KeyboardInterrupt: after every process has cleaned up.
    """
    waiting, running = list(jobs), list[_Process]()
    with selectors.DefaultSelector() as selector, tempfile.TemporaryDirectory(prefix="tapeout-") as folder:
        try:
            while waiting or running:
                while (chosen := _next(waiting, running, workers, memory_bytes)) is not None:
                    waiting.remove(chosen)
                    process = _Process(chosen, Path(folder), command)
                    running.append(process)
                    selector.register(process.events, selectors.EVENT_READ, process)
                for key, _ in selector.select():
                    process = key.data
                    if process.take(listen):
                        continue
                    selector.unregister(process.events)
                    running.remove(process)
                    if (rest := process.end(listen)) is not None:
                        waiting.insert(0, rest)
        except BaseException:
            _stop(running)
            raise


def _next(
    waiting: Sequence[Estimated], running: Sequence[_Process], workers: int, memory_bytes: int
) -> Estimated | None:
    """The first job that fits beside those that run."""
    if len(running) >= workers:
        return None
    left = memory_bytes - sum(process.estimated.memory_bytes for process in running)
    return next((e for e in waiting if e.memory_bytes <= left or not running), None)


@dataclass
class _Process:
    """One build process and what it has told."""

    estimated: Estimated
    folder: Path
    command: Sequence[str]
    current: str | None = None
    finished: set[str] = field(default_factory=set)
    began: float = 0.0

    def __post_init__(self) -> None:
        read, write = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (see `close`)
        try:
            # A session of its own: Ctrl-C reaches this process alone, which then tells the others.
            self.process = subprocess.Popen(
                [*self.command, str(write)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                start_new_session=True,
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        self.events = os.fdopen(read, "rb", buffering=0)
        self._partial = b""
        assert self.process.stdin is not None
        with suppress(OSError):  # it is dead already, which its end will tell
            self.process.stdin.write(self.estimated.job.text().encode())
            self.process.stdin.flush()

    def take(self, listen: Callable[[Event], None]) -> bool:
        """Hand on what has come; False when nothing more will."""
        data = self.events.read(1 << 16)
        *lines, self._partial = (self._partial + (data or b"")).split(b"\n")
        for line in lines:
            event = parse_event(line)
            if event.kind == "started":
                self.current, self.began = event.title, time.perf_counter()
            elif event.kind in {"done", "failed"}:
                self.current = None
                self.finished.add(event.title)
            listen(event)
        return bool(data)

    def end(self, listen: Callable[[Event], None]) -> Estimated | None:
        """Take leave of a process that tells nothing more; returns what another one is to do."""
        code = self.process.wait()
        left = [t for t in self.estimated.job.tasks if t.title not in self.finished]
        reason = self._reason(code)
        self.close()
        if not left:
            return None
        # Who dies before the first task would die again; what it was at is not tried twice.
        lost = [t for t in left if t.title == self.current] or ([] if self.finished else left)
        for task in lost:
            listen(_failed(task, reason, time.perf_counter() - self.began if self.current else 0.0))
        rest = tuple(t for t in left if t not in lost)
        return replace(self.estimated, job=replace(self.estimated.job, tasks=rest)) if rest else None

    def _reason(self, code: int) -> TapeoutError:
        """Why the process ended, by its exit code and the end of what it printed."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        log = "".join(f"\n  {line}" for line in lines)
        if code == -signal.SIGKILL:
            return CapacityError(
                f"the build process was killed, most likely for want of memory{log}",
                hint="allow fewer --workers, or lower the engine's limits",
            )
        how = f"by signal {-code} ({_signal_name(-code)})" if code < 0 else f"with exit code {code}"
        return TapeoutError(f"the build process ended {how}{log}")

    def close(self) -> None:
        self.events.close()
        self._log.close()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def signal(self, number: int) -> None:
        """To the process and those it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _failed(task: Task, reason: TapeoutError, seconds: float) -> Event:
    return Event("failed", task.title, reason.message, reason.hint, reason.exit_code, seconds)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _stop(running: Sequence[_Process]) -> None:
    """End all processes: politely, then for good."""
    for process in running:
        process.signal(signal.SIGTERM)
    end = time.monotonic() + _GRACE_SECONDS
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, end - time.monotonic()))
    for process in running:
        process.signal(signal.SIGKILL)
        process.process.wait()
        process.close()
