"""Time a whole pack: starts the worker process, reads what it tells, and outlives its faults.

A candidate that crashes, breaks the context or hangs costs itself: the worker is started again and
goes on with the entry it was at, without that candidate. One that does so in a whole step costs that
step, a TensorRT segment its region at one bucket; times that were told stay.
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
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tapeout.plugins import errors
from tapeout.plugins.cuda import MatmulAlgorithm
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.target import GpuFacts
from tapeout.runtime.tactic_timer.pack import Pack
from tapeout.runtime.tactic_timer.results import PackTimes, RegionResult, Result, StepResult

#: What a worker may take for one announced step; the longest measured are tenths of a second.
STEP_TIMEOUT_S = 20.0
#: The same for a region, of which TensorRT-RTX makes the kernels where it runs.
REGION_TIMEOUT_S = 120.0
#: Until it is ready: the driver's start and reading the pack.
START_TIMEOUT_S = 120.0
WORKER = (sys.executable, "-m", "tapeout.runtime.tactic_timer.worker")

_STDERR_BYTES = 2000


def time_pack(
    path: Path,
    pack: Pack,
    *,
    device: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    check_gpu: Callable[[GpuFacts], None] = lambda facts: None,
    worker: Sequence[str] = WORKER,
    step_timeout_s: float = STEP_TIMEOUT_S,
    region_timeout_s: float = REGION_TIMEOUT_S,
) -> PackTimes:
    """Check and time every candidate of the pack at `path` on a GPU of this machine, then its whole steps and
    regions.

    Args:
        device: number of the GPU. progress: told what is under way.
        check_gpu: told the GPU before anything is timed; may raise.

    Raises:
        EngineIncompatibleError: no GPU or driver, or one that cannot run the pack.
        UsageError: cuda-bindings is not installed.
        TapeoutError: the worker could not start.
    """
    _check_bindings()
    timeouts = {"region": region_timeout_s, "": step_timeout_s}
    session = _Session(path, pack, device, progress, check_gpu, worker, timeouts)
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
        check_gpu: Callable[[GpuFacts], None],
        worker: Sequence[str],
        timeouts_s: Mapping[str, float],
    ) -> None:
        self._path, self._pack, self._device, self._progress = path, pack, device, progress
        self._check_gpu = check_gpu
        self._command, self._timeouts_s = list(worker), timeouts_s
        self._times: PackTimes | None = None
        self._left = list(range(len(pack.entries)))
        self._steps_left = list(range(len(pack.steps)))
        self._regions_left = list(range(len(pack.region_cases)))
        self._lost: dict[int, dict[int, str]] = {}
        self._at: Mapping[str, Any] | None = None  # the message that announced what is under way

    def run(self) -> PackTimes:
        while self._unfinished() or self._times is None:
            before = self._progress_made()
            self._run_worker()
            assert self._times is not None
            if self._unfinished():
                self._times.restarts += 1
                if before == self._progress_made():
                    raise TapeoutError(f"the timing process ends without getting on: {self._doing()}")
        return self._times

    def _unfinished(self) -> bool:
        return bool(self._left or self._steps_left or self._regions_left)

    def _progress_made(self) -> tuple[int, ...]:
        lost = sum(map(len, self._lost.values()))
        return len(self._left), len(self._steps_left), len(self._regions_left), lost

    def _run_worker(self) -> None:
        """One life of the worker; afterwards what it was at is done, or lost."""
        self._at = None
        job = {
            "pack": str(self._path),
            "device": self._device,
            "entries": self._left,
            "lost": self._lost,
            "steps": self._steps_left,
            "regions": self._regions_left,
            "known": self._known(),
        }
        with tempfile.TemporaryFile() as stderr, _Process(self._command, job, stderr) as process:
            while True:
                timeout = self._timeout_s()
                try:
                    message = process.messages.get(timeout=timeout)
                except queue.Empty:
                    self._lose(f"no answer within {timeout:g} s while {self._doing()}")
                    return
                if message is None:
                    if self._unfinished():
                        self._lose(f"the process ended with {process.end()} while {self._doing()}", stderr)
                    return
                if not self._take(message):
                    return

    def _timeout_s(self) -> float:
        if self._times is None or self._at is None:
            return START_TIMEOUT_S
        return self._timeouts_s["region" if "region" in self._at else ""]

    def _take(self, message: Mapping[str, Any]) -> bool:
        """Note a message; False when the worker has nothing more to say."""
        event = message["event"]
        if event == "ready":
            if self._times is None:
                facts = GpuFacts(**message["gpu"])
                self._check_gpu(facts)
                self._times = PackTimes(facts)
        elif event == "error":
            kind = getattr(errors, str(message["kind"]), TapeoutError)
            raise kind(message["message"], hint=message["hint"])
        elif event == "begin":
            self._at = message
            self._tell_progress(message)
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
        elif event == "step":
            self._take_step(message)
            self._steps_left.remove(message["step"])
            self._at = None
        elif event == "region":
            self._take_region(message)
            self._regions_left.remove(message["region"])
            self._at = None
        elif event == "fault":
            self._lose(f"{message['reason']} while {self._doing()}")
            return False
        return True

    def _lose(self, reason: str, stderr: IO[bytes] | None = None) -> None:
        """What was under way is lost: a candidate, all of an entry when its reference was running, a step, or
        a region."""
        if self._times is None or self._at is None:
            raise TapeoutError(
                f"the timing process failed before it measured anything: {reason}{_tail(stderr)}",
                hint="nvidia-smi shows whether the GPU and its driver work",
            )
        self._progress(f"lost: {reason}")
        if "step" in self._at:
            self._times.steps[self._at["step"]] = StepResult(None, reason=reason)
            self._steps_left.remove(self._at["step"])
            return
        if "region" in self._at:
            self._times.regions[self._at["region"]] = RegionResult(None, reason=reason)
            self._regions_left.remove(self._at["region"])
            return
        entry, candidate = self._at["entry"], self._at["candidate"]
        lost = self._lost.setdefault(entry, {})
        everything = range(len(self._pack.entries[entry].candidates))
        for index in (candidate,) if candidate >= 0 else everything:
            if index not in lost and (candidate >= 0 or (entry, index) not in self._times.results):
                lost[index] = reason
                self._times.results[entry, index] = Result(None, reason)
        if candidate < 0:
            self._left.remove(entry)

    def _take_step(self, message: Mapping[str, Any]) -> None:
        index, times = message["step"], self._times_so_far()
        if message.get("skipped") is not None:
            times.skipped_steps[index] = message["skipped"]
            return
        times.steps[index] = StepResult(
            message.get("time_us"),
            message.get("alone_us"),
            dict(message.get("winners", ())),
            message.get("reason"),
        )

    def _take_region(self, message: Mapping[str, Any]) -> None:
        index, times = message["region"], self._times_so_far()
        if message.get("skipped") is not None:
            times.skipped_regions[index] = message["skipped"]
            return
        times.regions[index] = RegionResult(
            message.get("time_us"),
            message.get("own_us"),
            message.get("reason"),
            bool(message.get("unavailable")),
        )

    def _known(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Times that a later worker needs for whole steps, of entries that are done."""
        known: dict[int, dict[int, dict[str, Any]]] = {}
        for (entry, candidate), result in self._times.results.items() if self._times else ():
            if result.time_us is not None and entry not in self._left:
                algorithm = result.algorithm and asdict(result.algorithm)
                told = {"time_us": result.time_us, "algorithm": algorithm}
                known.setdefault(entry, {})[candidate] = told
        return known

    def _tell_progress(self, begun: Mapping[str, Any]) -> None:
        """Of an entry when its reference runs, of a whole step when its operands are made, of a region when
        its segment is loaded."""
        pack, phase = self._pack, begun["phase"]
        if "region" in begun:
            wanted, count, left = "load", len(pack.region_cases), self._regions_left
        elif "step" in begun:
            wanted, count, left = "operands", len(pack.steps), self._steps_left
        else:
            wanted, count, left = "reference", len(pack.entries), self._left
        if phase == wanted and begun.get("candidate", -1) < 0:
            self._progress(f"{count - len(left) + 1} of {count}: {self._title(begun)}")

    def _title(self, begun: Mapping[str, Any]) -> str:
        """What a message speaks of."""
        if "region" in begun:
            return self._pack.region_title(begun["region"])
        if "step" in begun:
            return self._pack.steps[begun["step"]].title()
        return self._pack.entries[begun["entry"]].title()

    def _doing(self) -> str:
        if self._at is None:
            return "starting"
        phase = self._at["phase"]
        if "step" in self._at or "region" in self._at:
            doing = {"check": "checking", "time": "timing"}.get(phase, "preparing")
            return f"{doing} {self._title(self._at)}"
        candidate, tactics = self._at["candidate"], self._pack.entries[self._at["entry"]].candidates
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
