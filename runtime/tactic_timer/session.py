"""Time a whole pack: starts the worker process, reads what it tells, and outlives its faults.

A candidate that crashes, breaks the context or hangs costs itself: the worker is started again and
goes on with the entry it was at, without that candidate.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tapeout.plugins import errors
from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.tactic_timer.pack import Pack

#: What a worker may take for one announced step; the longest measured are tenths of a second.
STEP_TIMEOUT_S = 20.0
#: Until it is ready: the driver's start and reading the pack.
START_TIMEOUT_S = 120.0
WORKER = (sys.executable, "-m", "tapeout.runtime.tactic_timer.worker")

_STDERR_BYTES = 2000


@dataclass(frozen=True)
class Result:
    """Microseconds a call of a candidate, or why it may not be used.

    algorithm: what its product was timed with. unavailable: it was not tried, for want of a library.
    """

    time_us: float | None
    reason: str | None = None
    algorithm: MatmulAlgorithm | None = None
    unavailable: bool = False


@dataclass
class PackTimes:
    """What was found out.

    Attributes:
        gpu: where.
        results: entry and candidate index to result; absent where an entry was skipped.
        skipped: entry index to why nothing was measured, for example too little memory.
        restarts: how often the worker was started again.
        seconds: all of it took.
    """

    gpu: GpuFacts
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    restarts: int = 0
    seconds: float = 0.0


def time_pack(
    path: Path,
    pack: Pack,
    *,
    device: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> PackTimes:
    """Check and time every candidate of the pack at `path` on a GPU of this machine.

    Args:
        device: number of the GPU. progress: told what is under way.

    Raises:
        EngineIncompatibleError: no GPU or driver, or one that cannot run the pack.
        UsageError: cuda-bindings is not installed.
        TapeoutError: the worker could not start.
    """
    _check_bindings()
    session = _Session(path, pack, device, progress, worker, step_timeout_s)
    start = time.monotonic()
    times = session.run()
    times.seconds = time.monotonic() - start
    return times


class _Session:
    def __init__(
        self,
        path: Path,
        pack: Pack,
        device: int,
        progress: Callable[[str], None],
        worker: Sequence[str],
        step_timeout_s: float,
    ) -> None:
        self._path, self._pack, self._device, self._progress = path, pack, device, progress
        self._command, self._timeout_s = list(worker), step_timeout_s
        self._times: PackTimes | None = None
        self._left = list(range(len(pack.entries)))
        self._lost: dict[int, dict[int, str]] = {}
        self._at: tuple[int, int, str] | None = None  # entry, candidate, phase under way

    def run(self) -> PackTimes:
        while self._left or self._times is None:
            before = len(self._left), sum(map(len, self._lost.values()))
            self._run_worker()
            assert self._times is not None
            if self._left:
                self._times.restarts += 1
                if before == (len(self._left), sum(map(len, self._lost.values()))):
                    raise TapeoutError(f"the timing process ends without getting on: {self._doing()}")
        return self._times

    def _run_worker(self) -> None:
        """One life of the worker; afterwards what it was at is done, or lost."""
        self._at = None
        job = {
            "pack": str(self._path),
            "device": self._device,
            "entries": self._left,
            "lost": self._lost,
        }
        with tempfile.TemporaryFile() as stderr, _Process(self._command, job, stderr) as process:
            while True:
                timeout = START_TIMEOUT_S if self._times is None or self._at is None else self._timeout_s
                try:
                    message = process.messages.get(timeout=timeout)
                except queue.Empty:
                    self._lose(f"no answer within {timeout:g} s while {self._doing()}")
                    return
                if message is None:
                    if self._left:
                        self._lose(f"the process ended with {process.end()} while {self._doing()}", stderr)
                    return
                if not self._take(message):
                    return

    def _take(self, message: Mapping[str, Any]) -> bool:
        """Note a message; False when the worker has nothing more to say."""
        event = message["event"]
        if event == "ready":
            self._times = self._times or PackTimes(GpuFacts(**message["gpu"]))
        elif event == "error":
            kind = getattr(errors, str(message["kind"]), TapeoutError)
            raise kind(message["message"], hint=message["hint"])
        elif event == "begin":
            self._at = message["entry"], message["candidate"], message["phase"]
            if self._at[1] < 0 and self._at[2] == "reference":
                done = len(self._pack.entries) - len(self._left)
                title = self._pack.entries[self._at[0]].title()
                self._progress(f"{done + 1} of {len(self._pack.entries)}: {title}")
        elif event == "outcome":
            algorithm = message.get("algorithm")
            result = Result(
                message.get("time_us"),
                message.get("reason"),
                None if algorithm is None else MatmulAlgorithm(**algorithm),
                bool(message.get("unavailable")),
            )
            self._times_so_far().results[message["entry"], message["candidate"]] = result
        elif event == "entry":
            if message["skipped"] is not None:
                self._times_so_far().skipped[message["entry"]] = message["skipped"]
            self._left.remove(message["entry"])
            self._at = None
        elif event == "fault":
            self._lose(f"{message['reason']} while {self._doing()}")
            return False
        return True

    def _lose(self, reason: str, stderr: IO[bytes] | None = None) -> None:
        """What was under way is lost: a candidate, or all of an entry when its reference was running."""
        if self._times is None or self._at is None:
            raise TapeoutError(
                f"the timing process failed before it measured anything: {reason}{_tail(stderr)}",
                hint="nvidia-smi shows whether the GPU and its driver work",
            )
        entry, candidate, _ = self._at
        lost = self._lost.setdefault(entry, {})
        everything = range(len(self._pack.entries[entry].candidates))
        for index in (candidate,) if candidate >= 0 else everything:
            if index not in lost and (candidate >= 0 or (entry, index) not in self._times.results):
                lost[index] = reason
                self._times.results[entry, index] = Result(None, reason)
        if candidate < 0:
            self._left.remove(entry)
        self._progress(f"lost: {reason}")

    def _doing(self) -> str:
        if self._at is None:
            return "starting"
        entry, candidate, phase = self._at
        tactics = self._pack.entries[entry].candidates
        return {"check": "checking ", "time": "timing "}.get(phase, "preparing ") + (
            tactics[candidate].tactic if candidate >= 0 else f"the {phase}"
        )

    def _times_so_far(self) -> PackTimes:
        if self._times is None:
            raise TapeoutError("the timing process spoke before it was ready")
        return self._times


class _Process:
    """A worker with its job; `messages` ends with None. Killed on the way out."""

    def __init__(self, command: Sequence[str], job: Mapping[str, Any], stderr: IO[bytes]) -> None:
        # The child finds the package where this process did, however that was arranged.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(json.dumps(job))
        except OSError:
            pass  # it ended at once; the reader will tell

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def end(self) -> str:
        """How it ended, for people."""
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                break  # cut off by its end
            self.messages.put(message)
        self.messages.put(None)


def _tail(stderr: IO[bytes] | None) -> str:
    """The end of what a worker printed, on lines of its own."""
    if stderr is None:
        return ""
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _STDERR_BYTES))
    text = stderr.read().decode(errors="replace").strip()
    return f"\n{text}" if text else ""


def _check_bindings() -> None:
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        raise UsageError(
            "timing needs cuda-bindings, which is not installed", hint="pip install 'tapeout[cuda]'"
        ) from None
