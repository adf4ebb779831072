"""Build processes: how many at once, and what becomes of the others when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tapeout.compiler.matrix import run_job
from tapeout.compiler.matrix.job import ENGINE, Event, Job, Task, parse_job
from tapeout.compiler.matrix.processes import WORKER as WORKER_COMMAND
from tapeout.compiler.matrix.processes import Estimated, run_jobs
from tapeout.compiler.options import BuildOptions

WORKER = (sys.executable, str(Path(__file__).with_name("scripted_worker.py")))


class Run:
    """Jobs of scripted tasks: their events, and what ran at the same time."""

    def __init__(self, folder: Path) -> None:
        self.log, self.folder = folder / "log", folder
        self.events: list[Event] = []

    def job(self, *names: str, memory_bytes: int = 1) -> Estimated:
        tasks = tuple(Task(f"m/{n}", ENGINE, self.folder / f"{n}.engine", BuildOptions()) for n in names)
        return Estimated(Job("model", tasks, self.log), memory_bytes)

    def go(self, *jobs: Estimated, workers: int = 2, memory_bytes: int = 100) -> dict[str, Event]:
        listen = self.events.append
        run_jobs(jobs, workers=workers, memory_bytes=memory_bytes, listen=listen, command=WORKER)
        ends = [e for e in self.events if e.kind in {"done", "failed"}]
        assert len({e.title for e in ends}) == len(ends), "a task ends once"
        return {e.title.removeprefix("m/"): e for e in ends}

    def at_once(self) -> int:
        running = most = 0
        for line in self.log.read_text().splitlines():
            running += 1 if line[0] == "+" else -1
            most = max(most, running)
        return most


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_job_survives_the_pipe(tmp_path: Path) -> None:
    options = BuildOptions(target="cuda:h200", timing_cache=tmp_path / "c.json", seed=3, weights="shared")
    job = Job("org/model", (Task("m/h200", ENGINE, tmp_path / "x.engine", options),), tmp_path / "lock", 2)
    assert parse_job(job.text()) == job


def test_a_task_that_takes_long_tells_how_far_it_is() -> None:
    now, told = 0.0, list[Event]()
    stages = run_job._Stages("m/h200", told.append, clock=lambda: now)
    with stages.stage("tactics", "cuda:h200") as stage:
        for count in range(1, 26):
            now += 1
            stage.update(f"{count} of 25 kernels compiled")
    with stages.stage("write") as stage:
        stage.update("50% of 2 bytes")
    texts = ["tactics", *(f"tactics ... {n} of 25 kernels compiled" for n in (10, 20)), "write"]
    assert told == [Event("stage", "m/h200", text) for text in texts]


@pytest.mark.parametrize(("workers", "memory", "most"), [(3, 100, 3), (2, 100, 2), (3, 4, 2), (3, 1, 1)])
def test_workers_and_memory_bound_what_runs(run: Run, workers: int, memory: int, most: int) -> None:
    jobs = [run.job(f"ok-{i}", f"ok-{i}b", f"ok-{i}c", f"ok-{i}d", memory_bytes=2) for i in range(4)]
    ends = run.go(*jobs, workers=workers, memory_bytes=memory)
    assert len(ends) == 16
    assert run.at_once() <= most
    if most > 1:
        assert run.at_once() > 1


def test_a_job_that_fits_goes_ahead_of_one_that_does_not(run: Run) -> None:
    ends = run.go(
        run.job("ok-1", "ok-1b", memory_bytes=3),
        run.job("ok-2", memory_bytes=3),
        run.job("ok-3"),
        memory_bytes=4,
    )
    assert set(ends) == {"ok-1", "ok-1b", "ok-2", "ok-3"}
    begun = [e.title for e in run.events if e.kind == "started"]
    assert begun.index("m/ok-3") < begun.index("m/ok-2")


def test_a_failure_stops_nothing(run: Run) -> None:
    ends = run.go(run.job("ok-1", "fails-1", "ok-2"), run.job("ok-3"))
    assert {n: e.kind for n, e in ends.items()} == {
        "ok-1": "done", "fails-1": "failed", "ok-2": "done", "ok-3": "done"
    }  # fmt: skip
    assert (ends["fails-1"].text, ends["fails-1"].hint, ends["fails-1"].exit_code) == (
        "no luck",
        "try again",
        5,
    )
    assert ends["ok-1"].details["pid"] == ends["ok-2"].details["pid"]


def test_after_a_death_another_process_does_the_rest(run: Run) -> None:
    ends = run.go(run.job("ok-1", "killed-1", "ok-2", "exits-1", "ok-3"))
    assert [n for n, e in ends.items() if e.kind == "done"] == ["ok-1", "ok-2", "ok-3"]
    assert len({ends[n].details["pid"] for n in ("ok-1", "ok-2", "ok-3")}) == 3
    assert ends["killed-1"].exit_code == 4
    assert "most likely for want of memory" in ends["killed-1"].text
    assert ends["exits-1"].exit_code == 1
    assert ends["exits-1"].text.splitlines() == [
        "the build process ended with exit code 7", "  something went wrong", "  badly"
    ]  # fmt: skip


def test_who_cannot_begin_is_not_tried_for_ever(run: Run) -> None:
    jobs = [run.job("ok-1")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "folder", run.folder)
        run_jobs(
            [*jobs, run.job("ok-2", "ok-3")],
            workers=1,
            memory_bytes=9,
            listen=run.events.append,
            command=(sys.executable, "-c", "raise SystemExit('no such thing')"),
        )
    assert [(e.kind, e.title) for e in run.events] == [("failed", f"m/ok-{i}") for i in (1, 2, 3)]
    assert all("no such thing" in e.text for e in run.events)


def test_a_process_may_leave_the_rest_to_another(run: Run) -> None:
    ends = run.go(run.job("leaves-1", "ok-1"))
    assert (ends["leaves-1"].kind, ends["ok-1"].kind) == ("failed", "done")


def test_an_interrupt_ends_all_processes_after_they_cleaned_up(run: Run) -> None:
    waiting = [run.folder / f"waits-{i}.waiting" for i in (1, 2)]

    def interrupt() -> None:
        end = time.monotonic() + 120
        while not all(path.exists() for path in waiting) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.go(run.job("waits-1"), run.job("waits-2"), run.job("ok-1"))
    thread.join()
    assert all(path.with_suffix(".cleaned").exists() for path in waiting)
    assert not any(e.kind == "done" for e in run.events)


def test_a_real_process_ends_when_its_parent_is_gone(run: Run) -> None:
    """Nobody is left to interrupt it, so the end of its input does."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [*WORKER_COMMAND, str(write)], stdin=subprocess.PIPE, pass_fds=(write,), start_new_session=True
    )
    os.close(write)
    assert process.stdin is not None
    process.stdin.write(run.job("ok-1").job.text().encode())
    process.stdin.close()
    assert process.wait(60) in (130, -signal.SIGINT)  # the second where it was still starting
    assert os.read(read, 1) == b""
    os.close(read)
