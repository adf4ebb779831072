"""`tapeout simulate` and `tapeout explain`: the golden example, every output form, refusals."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli

Line = dict[str, Any] | str

GOLDEN: list[Line] = [
    {"id": "R1", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 4},
    {"id": "R2", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 12},
    {"id": "R3", "arrival_step": 0, "prompt_tokens": 16, "max_tokens": 12},
    {"id": "R4", "arrival_step": 1, "prompt_tokens": 9000, "max_tokens": 4},
    {"id": "R5", "arrival_step": 1, "prompt_tokens": 20, "max_tokens": 4},
]
GOLDEN_OPTIONS = (
    *("--no-overlap", "--max-batch-size", "4", "--max-num-tokens", "4096", "--chunk-tokens", "2048"),
    *("--policy", "GUARANTEED_NO_EVICT"),
)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[list[Line]], Path]:
    def make(lines: list[Line]) -> Path:
        path = tmp_path / "workload.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return make


@pytest.fixture
def golden(write: Callable[[list[Line]], Path]) -> Path:
    return write(GOLDEN)


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, args)))


def ok(*args: str | Path) -> Result:
    result = call(*args)
    assert result.exit_code == 0, result.stderr
    return result


def refused(*args: str | Path) -> str:
    result = call(*args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert "hint: " in result.stderr
    return str(result.stderr)


def test_the_golden_example_step_by_step(golden: Path) -> None:
    data = json.loads(ok("simulate", golden, *GOLDEN_OPTIONS, "--json").stdout)
    steps = data["steps"]
    assert [s["step"] for s in steps] == list(range(12))
    assert all(set(s) == {"step", "context", "generation", "held", "paused", "finished"} for s in steps)
    assert steps[0]["context"] == [{"id": f"R{i}", "start": 0, "tokens": 16} for i in (1, 2, 3)]
    chunks = {s["step"]: c for s in steps for c in s["context"] if c["id"] == "R4"}
    assert chunks == {
        **{n: {"id": "R4", "start": 2048 * (n - 1), "tokens": 2048} for n in (1, 2, 3, 4)},
        5: {"id": "R4", "start": 8192, "tokens": 808},
    }
    for step in (1, 2, 3):
        assert steps[step]["generation"] == ["R1", "R2", "R3"]
        ((held),) = steps[step]["held"]
        assert held["id"] == "R5"
        assert "max_batch_size is reached" in held["reason"]
    assert steps[3]["finished"] == ["R1"]
    assert {"id": "R5", "start": 0, "tokens": 20} in steps[4]["context"]
    assert all(not s["held"] for s in steps if s["step"] not in (1, 2, 3))
    ends = {name: s["step"] for s in steps for name in s["finished"]}
    assert ends == {"R1": 3, "R5": 7, "R4": 8, "R2": 11, "R3": 11}
    assert not any(s["paused"] for s in steps)
    for name, wanted in (("R1", 4), ("R2", 12), ("R3", 12), ("R4", 4), ("R5", 4)):
        # Every token but the first, which the step of the last chunk gives.
        assert sum(name in s["generation"] for s in steps) == wanted - 1
    summary = data["summary"]
    assert (summary["requests"], summary["finished"], summary["steps"]) == (5, {"length": 5}, 12)
    assert (summary["context_tokens"], summary["output_tokens"]) == (9068, 36)
    assert summary["settings"]["chunk_tokens"] == 2048


def test_the_documented_table_is_the_real_one(golden: Path) -> None:
    text = (ROOT / "docs" / "scheduling.md").read_text()
    (block,) = re.findall(r"<!-- golden -->\n```text\n(.*?)```", text, re.S)
    assert block == ok("simulate", golden, *GOLDEN_OPTIONS).stdout


def test_a_trace_explains_as_the_simulation_did(golden: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    for form in ((), ("--json",), ("--summary",), ("--steps", "2-4"), ("--summary", "--json")):
        simulated = ok("simulate", golden, *GOLDEN_OPTIONS, "--trace", trace, *form).stdout
        assert ok("explain", trace, *form).stdout == simulated


def test_steps_are_chosen(golden: Path) -> None:
    text = ok("simulate", golden, *GOLDEN_OPTIONS, "--steps", "4-5").stdout
    assert text.splitlines()[0].split() == ["step", "4", "5"]
    assert "step 4: R5: context" in text
    assert "step 1" not in text
    assert "step 11" in ok("simulate", golden, *GOLDEN_OPTIONS, "--steps", "11").stdout
    for bad in ("x", "5-4", "-3"):
        assert "expected steps such as" in refused("simulate", golden, f"--steps={bad}")


class Tags(HTMLParser):
    """Counts tags and notes what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_has_a_picture_of_its_own(write: Callable[[list[Line]], Path], tmp_path: Path) -> None:
    lines = [*GOLDEN[:-1], {"id": "<b>R5</b>", "arrival_step": 1, "prompt_tokens": 20, "max_tokens": 4}]
    page = tmp_path / "steps.html"
    result = ok("simulate", write(lines), *GOLDEN_OPTIONS, "--html", page)
    assert f"wrote {page}" in result.stderr
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.loaded == []
    assert "script" not in tags.counts
    assert "b" not in tags.counts, "ids are escaped"
    (svg,) = re.findall(r"<svg.*?</svg>", text, re.S)
    picture = ElementTree.fromstring(svg)
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(t.startswith("R4, step ") and "tokens from" in t for t in titles) == 5
    assert any(t.startswith("<b>R5</b>, steps 1-3: waiting: max_batch_size is reached") for t in titles)
    assert any(t.startswith("R1 ends in step 3") for t in titles)


def test_pausing_shows(write: Callable[[list[Line]], Path]) -> None:
    """Two that grow beyond the pool: the newer one is paused, and its tokens are computed again."""
    lines: list[Line] = [
        {"id": name, "arrival_step": 0, "prompt_tokens": 8, "max_tokens": 20} for name in ("old", "new")
    ]
    options = ("--policy", "max-utilization", "--pages", "10", "--tokens-per-page", "4", "--no-overlap")
    data = json.loads(ok("simulate", write(lines), *options, "--json").stdout)
    (paused,) = [s["step"] for s in data["steps"] if s["paused"]]
    assert data["steps"][paused]["paused"] == ["new"]
    resumed = next(s["step"] for s in data["steps"][paused:] if s["context"])
    assert data["steps"][resumed]["context"][0]["id"] == "new"
    between = [s for s in data["steps"] if paused <= s["step"] < resumed]
    assert all(s["held"][0]["id"] == "new" and s["held"][0]["reason"].startswith("paused") for s in between)
    assert "old" in next(s for s in data["steps"] if s["step"] == resumed - 1)["finished"]
    context = data["steps"][resumed]["context"][0]
    assert data["summary"]["recomputed_tokens"] == context["tokens"] - 1  # the newest was never cached
    assert data["summary"]["output_tokens"] == 40
    text = ok("simulate", write(lines), *options).stdout
    assert "this is the newest request" in text
    assert " p " in text


def test_a_static_batch_runs_to_its_end(write: Callable[[list[Line]], Path]) -> None:
    lines: list[Line] = [
        {"id": f"q{i}", "arrival_step": 0, "prompt_tokens": 4, "max_tokens": 2 + 3 * (i % 2)}
        for i in range(4)
    ]
    result = ok(
        "simulate",
        write(lines),
        "--policy",
        "STATIC_BATCH",
        "--max-batch-size",
        "2",
        "--no-overlap",
        "--json",
    )
    steps = json.loads(result.stdout)["steps"]
    begins = {c["id"]: s["step"] for s in steps for c in s["context"]}
    assert begins == {"q0": 0, "q1": 0, "q2": 5, "q3": 5}
    assert "static batch, 1 requests" in steps[3]["held"][0]["reason"]


def test_priorities_are_admitted_first_and_fcfs_within(write: Callable[[list[Line]], Path]) -> None:
    lines: list[Line] = [
        {"id": "a", "arrival_step": 0, "prompt_tokens": 4, "max_tokens": 3},
        {"id": "low", "arrival_step": 0, "prompt_tokens": 4, "max_tokens": 3, "priority": -1},
        {"id": "b", "arrival_step": 1, "prompt_tokens": 4, "max_tokens": 3},
        {"id": "high", "arrival_step": 1, "prompt_tokens": 4, "max_tokens": 3, "priority": 5},
        {"id": "c", "arrival_step": 1, "prompt_tokens": 4, "max_tokens": 3},
    ]
    steps = json.loads(ok("simulate", write(lines), "--max-batch-size", "1", "--json").stdout)["steps"]
    assert [c["id"] for s in steps for c in s["context"]] == ["a", "high", "b", "c", "low"]


def test_what_never_fits_is_refused_with_its_numbers_and_the_rest_runs(
    write: Callable[[list[Line]], Path],
) -> None:
    lines: list[Line] = [
        {"id": "huge", "arrival_step": 0, "prompt_tokens": 100, "max_tokens": 10},
        {"id": "small", "arrival_step": 0, "prompt_tokens": 4, "max_tokens": 2},
    ]
    data = json.loads(ok("simulate", write(lines), "--pages", "3", "--json").stdout)
    assert data["summary"]["refused"] == [
        {
            "id": "huge",
            "reason": "100 prompt tokens and 10 to generate need 4 KV pages of 32 tokens; the pool has 3",
        }
    ]
    assert data["summary"]["finished"] == {"error": 1, "length": 1}
    assert [s["finished"] for s in data["steps"]][-1] == ["small"]


def test_idle_steps_are_passed_over_and_order_of_lines_does_not_matter(
    write: Callable[[list[Line]], Path],
) -> None:
    lines: list[Line] = [
        {"id": "late", "arrival_step": 10**9, "prompt_tokens": 4, "max_tokens": 2},
        {"id": "early", "arrival_step": 3, "prompt_tokens": 4, "max_tokens": 2},
    ]
    steps = json.loads(ok("simulate", write(lines), "--no-overlap", "--json").stdout)["steps"]
    assert [(s["step"], s["finished"]) for s in steps] == [
        (3, []), (4, ["early"]), (10**9, []), (10**9 + 1, ["late"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "[1] is no object, expected {id, arrival_step"),
        ('{"id": "a", "arrival_step": NaN}', "NaN is no JSON value"),
        (
            {"id": "a", "arrival_step": 0, "prompt_tokens": 0, "max_tokens": 1},
            "prompt_tokens = 0, expected an",
        ),
        ({"id": "a", "arrival_step": -1, "prompt_tokens": 1, "max_tokens": 1}, "arrival_step = -1, expected"),
        ({"id": "", "arrival_step": 0, "prompt_tokens": 1, "max_tokens": 1}, "id = '', expected text"),
        ({"id": "a", "arrival_step": 0, "prompt_tokens": 1}, "max_tokens is missing, expected an integer"),
        (
            {"id": "a", "arrival_step": 0, "prompt_tokens": 1, "max_tokens": True},
            "max_tokens = True, expected an integer",
        ),
        (
            {"id": "a", "arrival_step": 0, "prompt_token": 1, "max_tokens": 1},
            "unknown field 'prompt_token', did you mean 'prompt_tokens'?",
        ),
        (
            {"id": "a", "arrival_step": 0, "prompt_tokens": 1, "max_tokens": 1, "priority": 10**7},
            "priority = 10000000, expected an integer from -1,000,000 to 1,000,000",
        ),
        (GOLDEN[1], "id = 'R2', expected another one: line 2 has it"),
    ],
)
def test_bad_lines_are_named(write: Callable[[list[Line]], Path], line: Line, expected: str) -> None:
    path = write([*GOLDEN[:2], line, "", GOLDEN[2]])
    message = refused("simulate", path)
    assert f"{path}:3: " in message
    assert expected in message


def test_all_bad_lines_are_named_at_once_but_not_endlessly(write: Callable[[list[Line]], Path]) -> None:
    message = refused("simulate", write(["{}", GOLDEN[0], "7"]))
    assert ":1: id is missing" in message
    assert ":3: 7 is no object" in message
    message = refused("simulate", write(["7"] * 100))
    assert message.count("is no object") == 20
    assert "there may be more" in message


def test_a_workload_that_is_none(write: Callable[[list[Line]], Path], tmp_path: Path) -> None:
    assert "holds no requests" in refused("simulate", write([""]))
    assert "No such file" in refused("simulate", tmp_path / "none.jsonl")
    assert "Is a directory" in refused("simulate", tmp_path)


def test_a_workload_may_come_through_a_pipe(golden: Path) -> None:
    read, write_end = os.pipe()
    os.write(write_end, golden.read_bytes())
    os.close(write_end)
    try:
        assert "requests: 5" in ok("simulate", f"/dev/fd/{read}", "--summary").stdout
    finally:
        os.close(read)


def test_outputs_are_checked_before_anything_runs(golden: Path, tmp_path: Path) -> None:
    before = golden.read_text()
    for option in ("--html", "--trace"):
        assert "is an input of this command" in refused("simulate", golden, option, golden)
        assert "does not exist" in refused("simulate", golden, option, tmp_path / "no" / "x")
    assert golden.read_text() == before
    assert "-1 is not in the range" in refused("simulate", golden, "--pages", "-1")
    assert "tokens_per_page = 100000, expected" in refused("simulate", golden, "--tokens-per-page", "100000")
    assert "is not one of" in refused("simulate", golden, "--policy", "best")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "is empty, expected a trace"),
        (["nonsense"], ":1: not JSON"),
        (['{"event": "step"}'], "event = 'step', expected 'start' on the first line"),
        (['{"event": "start", "format": 99}'], "format = 99, expected 1, the trace format of this version"),
        (['{"event": "start", "format": 1}', '{"event": "step", "step": 0}'], ":2: pages_used is missing"),
        (
            [
                '{"event": "start", "format": 1}',
                '{"event": "step", "step": 0, "pages_used": 0, "context": [1]}',
            ],
            ":2: context = [1], expected a list of {id, start, tokens, reason}",
        ),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert expected in refused("explain", path)


def test_run_writes_a_trace_that_explain_shows(alphabet: Path, tmp_path: Path) -> None:
    trace, requests = tmp_path / "trace.jsonl", tmp_path / "requests.jsonl"
    requests.write_text(
        '{"prompt": "xyz"}\n{"prompt": "abc", "max_tokens": 3, "priority": 2}\n'
        '{"prompt": "m", "max_tokens": 2}\n'
    )
    common = ("--trace", trace, "--max-batch-size", "1", "--json")
    ok("run", alphabet, "--input", requests, *common, "--capacity-policy", "max-utilization")
    data = json.loads(ok("explain", trace, "--json").stdout)
    begins = [c["id"] for s in data["steps"] for c in s["context"]]
    assert begins == ["1", "0", "2"], "the one with priority first"
    assert data["summary"]["finished"] == {"length": 2, "stop": 1}
    assert data["summary"]["settings"]["capacity_policy"] == "max_utilization"
    assert "is an input of this command" in refused("run", alphabet, "--prompt", "a", "--trace", alphabet)
    requests.write_text('{"prompt": "a", "priority": "high"}\n')
    assert "priority = 'high', expected an integer" in refused("run", alphabet, "--input", requests)
    assert "is not one of" in refused("run", alphabet, "--prompt", "a", "--chunking-policy", "no")
