"""What became of the engines of a matrix, for people and for continuous integration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

#: How a result ended. PLANNED: a dry run. LEFT: interrupted before it was done.
BUILT, KEPT, FAILED, PLANNED, LEFT = "built", "kept", "failed", "planned", "left"
#: From worst to best: what is not understood, what the machine lacks, what the user can mend.
_WORST_FIRST = (1, 4, 3, 2, 5)
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SUMMARY, JUNIT = "summary.md", "junit.xml"


@dataclass(frozen=True)
class EngineResult:
    """One engine (or pack) of a matrix.

    Attributes:
        status: BUILT, KEPT, FAILED, PLANNED or LEFT.
        why: it was to be made, or may stay; what was found, in words that read well before and afterwards.
        file: that was to be made. size_bytes, sha256, key: of an engine that is there.
        message, hint, exit_code: of a failure.
        details: of the build: see `run_job`.
    """

    model: str
    name: str
    target: str
    status: str
    why: str
    file: Path
    seconds: float = 0.0
    size_bytes: int | None = None
    sha256: str | None = None
    key: str | None = None
    peak_memory_bytes: int = 0
    message: str = ""
    hint: str | None = None
    exit_code: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.model}/{self.name}"

    def told(self) -> str:
        """How it ended and why, in a line: `built (there was no engine yet)`."""
        return f"{self.status} ({self.why})" if self.why else self.status


@dataclass(frozen=True)
class MatrixReport:
    """A matrix run. `stage` is `compile` or `finish`; `warnings` are lines for the user."""

    output: Path
    stage: str
    results: tuple[EngineResult, ...]
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or the worst of the failures: see `_WORST_FIRST`."""
        codes = {r.exit_code for r in self.results if r.status == FAILED}
        return next((code for code in _WORST_FIRST if code in codes), max(codes, default=0))

    def counts(self) -> dict[str, int]:
        """Results by status, without those that do not occur."""
        found = [r.status for r in self.results]
        return {s: found.count(s) for s in (BUILT, KEPT, PLANNED, FAILED, LEFT) if s in found}

    def to_json(self) -> dict[str, Any]:
        """Plain data, paths as text."""
        results = [{"title": r.title, **asdict(r), "file": str(r.file)} for r in self.results]
        return {
            "output": str(self.output),
            "stage": self.stage,
            "exit_code": self.exit_code,
            "counts": self.counts(),
            "seconds": round(self.seconds, 3),
            "warnings": list(self.warnings),
            "results": results,
        }

    def markdown(self) -> str:
        """A table of all results, then every failure in full."""
        told = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        lines = [
            f"# Engines: {told or 'none'}",
            "",
            f"Stage `{self.stage}`, {self.seconds:.1f} s.",
            "",
            "| engine | target | result | size | tactics | seconds | why |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(result) for result in self.results]
        for text in self.warnings:
            lines += ["", f"Warning: {text}"]
        for result in self.results:
            if result.status == FAILED:
                hint = [f"hint: {result.hint}"] if result.hint else []
                told = "\n".join([result.message, *hint])
                lines += [
                    "",
                    f"## {result.title} failed ({result.exit_code})",
                    "",
                    "```",
                    _fenced(told),
                    "```",
                ]
        return "\n".join(lines) + "\n"

    def junit(self) -> str:
        """JUnit XML: a suite for each model, a case for each engine; what may stay has passed."""
        top = ElementTree.Element("testsuites", _counted(self.results))
        models = dict.fromkeys(r.model for r in self.results)
        for model in models:
            of_model = [r for r in self.results if r.model == model]
            suite = ElementTree.SubElement(top, "testsuite", {"name": model, **_counted(of_model)})
            for result in of_model:
                _add_case(suite, result)
        ElementTree.indent(top)
        return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ElementTree.Element, result: EngineResult) -> None:
    attributes = {"classname": result.model, "name": result.name, "time": f"{result.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    if result.status == FAILED:
        hint = f"\nhint: {result.hint}" if result.hint else ""
        text = _NO_XML.sub("?", result.message + hint)
        first = text.splitlines()[0] if text else "failed"
        failure = ElementTree.SubElement(
            case, "failure", {"message": first, "type": f"exit {result.exit_code}"}
        )
        failure.text = text
    elif result.status in {LEFT, PLANNED}:
        ElementTree.SubElement(case, "skipped", {"message": result.why or result.status})
    else:
        ElementTree.SubElement(case, "system-out").text = _NO_XML.sub("?", result.told())


def _counted(results: Sequence[EngineResult]) -> dict[str, str]:
    failed = sum(r.status == FAILED for r in results)
    skipped = sum(r.status in {LEFT, PLANNED} for r in results)
    seconds = sum(r.seconds for r in results)
    counts = {"tests": len(results), "failures": failed, "errors": 0, "skipped": skipped}
    return {**{name: str(count) for name, count in counts.items()}, "time": f"{seconds:.3f}"}


def _row(result: EngineResult) -> str:
    timed = result.details.get("timed")
    cells = (
        result.title,
        result.target,
        result.status,
        "" if result.size_bytes is None else f"{result.size_bytes / 2**20:.1f} MiB",
        "" if timed is None else ("timed" if timed else "defaults"),
        f"{result.seconds:.1f}" if result.seconds else "",
        result.why,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fenced(text: str) -> str:
    return text.replace("```", "'''")
