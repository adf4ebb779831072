"""What a matrix tells its build processes, and what they tell it: plain data in lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapeout.compiler.options import FIELDS, BuildOptions

ENGINE, PACK = "engine", "pack"


@dataclass(frozen=True)
class Task:
    """One file to make.

    Attributes:
        title: of the engine it belongs to. kind: ENGINE or PACK.
        output: the file.
    """

    title: str
    kind: str
    output: Path
    options: BuildOptions


@dataclass(frozen=True)
class Job:
    """The tasks of one model and precision: one process makes them, one after the other.

    Attributes:
        source: the MODEL argument.
        lock: a file that holds off other processes while something is timed.
        kernel_workers: processes that compile kernels; 0 for one a core.
    """

    source: str
    tasks: tuple[Task, ...]
    lock: Path
    kernel_workers: int = 0

    def text(self) -> str:
        """One line; `parse_job` takes it."""
        tasks = [
            {"title": t.title, "kind": t.kind, "output": str(t.output), "options": t.options.effective()}
            for t in self.tasks
        ]
        data = {"source": self.source, "lock": str(self.lock), "kernel_workers": self.kernel_workers}
        return json.dumps({**data, "tasks": tasks}) + "\n"


def parse_job(text: str | bytes) -> Job:
    data = json.loads(text)
    tasks = tuple(
        Task(t["title"], t["kind"], Path(t["output"]), _options(t["options"])) for t in data["tasks"]
    )
    return Job(data["source"], tasks, Path(data["lock"]), data["kernel_workers"])


def _options(values: Mapping[str, Any]) -> BuildOptions:
    paths = {n for n, option in FIELDS.items() if option.metadata["kind"] is Path}
    given: dict[str, Any] = {n: Path(v) if n in paths and v is not None else v for n, v in values.items()}
    return BuildOptions(**given)


@dataclass(frozen=True)
class Event:
    """Something a build process tells.

    Attributes:
        kind: `started`, `stage` (one begins, or has come further), `done` or `failed`.
        title: of the task.
        text: the stage and, once it is long under way, its detail; or the message of the failure.
        hint: of the failure.
        exit_code: of the failure, by the table in plugins/errors.py.
        seconds: the task took. peak_memory_bytes: of the process up to here.
        details: of a task that is done: plain data for the summary.
    """

    kind: str
    title: str
    text: str = ""
    hint: str | None = None
    exit_code: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def parse_event(line: str | bytes) -> Event:
    return Event(**json.loads(line))
