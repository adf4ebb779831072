"""What a matrix run tells: exit code, Markdown, JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tapeout.compiler.matrix.results import EngineResult, MatrixReport


def result(title: str, status: str, **facts: Any) -> EngineResult:
    model, name = title.split("/")
    return EngineResult(model, name, "cpu", status, facts.pop("why", ""), Path(f"{name}.engine"), **facts)


@pytest.fixture
def report() -> MatrixReport:
    results = (
        result(
            "a/cpu",
            "built",
            why="there was no engine yet",
            seconds=2.5,
            size_bytes=3 << 20,
            details={"timed": True},
        ),
        result("a/l4", "failed", message="it broke | here\nand `there`\x01 ```", hint="mend it", exit_code=5),
        result("b/cpu", "kept", why="unchanged"),
        result("b/l4", "left", why="there was no engine yet"),
    )
    return MatrixReport(Path("out"), "finish", results, 3.0, ("b/cpu: mind this",))


@pytest.mark.parametrize(
    ("codes", "worst"), [((), 0), ((5,), 5), ((5, 2), 2), ((2, 3, 5), 3), ((4, 3), 4), ((5, 4, 1), 1)]
)
def test_the_exit_code_is_that_of_the_worst_failure(codes: tuple[int, ...], worst: int) -> None:
    failed = [result(f"m/{i}", "failed", exit_code=code) for i, code in enumerate(codes)]
    report = MatrixReport(Path(), "finish", (result("m/x", "built"), *failed), 1.0)
    assert report.exit_code == worst


def test_markdown(report: MatrixReport) -> None:
    lines = report.markdown().splitlines()
    assert lines[0] == "# Engines: 1 built, 1 kept, 1 failed, 1 left"
    assert "| a/cpu | cpu | built | 3.0 MiB | timed | 2.5 | there was no engine yet |" in lines
    assert "## a/l4 failed (5)" in lines
    assert "hint: mend it" in lines
    assert "Warning: b/cpu: mind this" in lines
    table = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in table} == {8}
    assert sum(line.startswith("```") for line in lines) == 2


def test_the_reason_stands_apart_from_the_status(report: MatrixReport) -> None:
    told = [r.told() for r in report.results]
    assert told == [
        "built (there was no engine yet)", "failed", "kept (unchanged)", "left (there was no engine yet)"
    ]  # fmt: skip


def test_junit(report: MatrixReport) -> None:
    top = ElementTree.fromstring(report.junit())
    assert top.attrib == {"tests": "4", "failures": "1", "errors": "0", "skipped": "1", "time": "2.500"}
    suites = {suite.get("name"): suite for suite in top}
    assert list(suites) == ["a", "b"]
    assert [case.get("name") for case in suites["a"]] == ["cpu", "l4"]
    (failure,) = suites["a"].iter("failure")
    assert failure.get("message") == "it broke | here"
    assert failure.text == "it broke | here\nand `there`? ```\nhint: mend it"
    assert [out.text for out in top.iter("system-out")] == [
        "built (there was no engine yet)", "kept (unchanged)"
    ]  # fmt: skip
    assert [case.get("name") for case in suites["b"] if case.find("skipped") is not None] == ["l4"]


def test_json(report: MatrixReport) -> None:
    data = json.loads(json.dumps(report.to_json()))
    assert data["exit_code"] == 5
    assert data["counts"] == {"built": 1, "kept": 1, "failed": 1, "left": 1}
    assert [r["title"] for r in data["results"]] == ["a/cpu", "a/l4", "b/cpu", "b/l4"]
