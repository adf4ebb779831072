"""A build process that does what its tasks' names say; for tests of who watches it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tapeout.compiler.matrix.job import Event, parse_job


def main() -> None:
    job = parse_job(sys.stdin.buffer.readline())
    stream = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    log = job.lock
    for task in job.tasks:
        what = task.title.partition("/")[2].partition("-")[0]
        if what == "dies-at-once":
            os.kill(os.getpid(), signal.SIGKILL)
        stream.write(Event("started", task.title).line())
        _note(log, f"+ {task.title}")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exits":
            sys.stdout.write("something went wrong\nbadly\n")
            sys.stdout.flush()
            os._exit(7)
        if what == "waits":
            _wait_for_end(task.output)
        time.sleep(0.05)
        _note(log, f"- {task.title}")
        if what == "fails":
            stream.write(Event("failed", task.title, "no luck", "try again", 5).line())
            continue
        if what == "leaves":
            stream.write(Event("failed", task.title, "a helper was killed", None, 4).line())
            return
        stream.write(Event("done", task.title, seconds=0.05, details={"pid": os.getpid()}).line())


def _wait_for_end(path: Path) -> None:
    try:
        path.with_suffix(".waiting").touch()
        time.sleep(60)
    finally:
        path.with_suffix(".cleaned").touch()


def _note(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()
