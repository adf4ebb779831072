"""`tapeout build --matrix`: what reaches the compiler, what is refused, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli
from tapeout.compiler.matrix import build_matrix as module
from tapeout.compiler.matrix.build_matrix import MatrixRequest
from tapeout.compiler.matrix.results import EngineResult, MatrixReport
from tapeout.plugins.errors import UsageError

OPTIONS_OF_ONE = (
    ("--target", "cpu"), ("--pack", "x.pack"), ("--dump", "d"), ("--timing-cache", "t.json"),
    ("--revision", "main"),
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, as far as keys look at it, and a matrix of two engines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "m.yaml").write_text("models: {tiny: ./model}\ntargets: [cpu, 'cuda:h200']")
    return tmp_path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[MatrixRequest]:
    """What is asked of the compiler, which builds nothing: one engine is built, one fails."""
    found: list[MatrixRequest] = []
    results = (
        EngineResult(
            "tiny", "cpu", "cpu", "built", "there was no engine yet", Path("cpu.engine"), 2.0, 3 << 20
        ),
        EngineResult(
            "tiny", "h200", "cuda:h200", "failed", "", Path("h200.engine"),
            message="no luck", hint="try again", exit_code=5,
        ),
    )  # fmt: skip

    def build(request: MatrixRequest, progress: Any) -> MatrixReport:
        found.append(request)
        return MatrixReport(request.output, request.stage, results, 2.5, ("tiny/cpu: mind this",))

    monkeypatch.setattr(module, "build_matrix", build)
    return found


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["build", *args])


def test_flags_reach_the_compiler(here: Path, requests: list[MatrixRequest]) -> None:
    run(
        "--matrix", "m.yaml", "-o", "out", "--stage", "compile", "--timings", "t", "--only", "a/*",
        "--only", "b/*",
        "--workers", "3", "--max-memory", "1.5", "--dry-run", "--max-batch-size", "7", "--no-verify",
    )  # fmt: skip
    assert requests == [
        MatrixRequest(
            matrix=Path("m.yaml"),
            output=Path("out"),
            stage="compile",
            timings=Path("t"),
            only=("a/*", "b/*"),
            flags={"max_batch_size": 7, "verify": False},
            workers=3,
            memory_bytes=3 << 29,
            dry_run=True,
        )
    ]


def test_what_it_comes_to_is_told(here: Path, requests: list[MatrixRequest]) -> None:
    done = run("--matrix", "m.yaml", "-o", "out")
    assert done.exit_code == 5
    assert done.stdout.splitlines() == [
        "warning: tiny/cpu: mind this",
        "failed: tiny/h200: no luck",
        "hint: try again",
        "  tiny/cpu   built     3.0 MiB    2.0 s  there was no engine yet",
        "  tiny/h200  failed",
        "1 built, 1 failed in out, 2.5 s",
    ]
    data = json.loads(run("--matrix", "m.yaml", "-o", "out", "--json").stdout)
    assert [r["status"] for r in data["results"]] == ["built", "failed"]


@pytest.mark.parametrize("option", OPTIONS_OF_ONE, ids=lambda o: o[0])
def test_options_of_one_engine(here: Path, requests: list[MatrixRequest], option: tuple[str, str]) -> None:
    done = run("--matrix", "m.yaml", "-o", "out", *option)
    assert done.exit_code == 2
    assert option[0] in done.stderr
    assert not requests


@pytest.mark.parametrize(
    "args",
    [("model",), ("--config", "m.yaml")],
    ids=["MODEL", "--config"],
)
def test_what_stands_in_the_file(here: Path, requests: list[MatrixRequest], args: tuple[str, ...]) -> None:
    done = run(*args, "--matrix", "m.yaml", "-o", "out")
    assert (done.exit_code, requests) == (2, [])
    assert "the file" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("model", "-o", "x", "--workers", "2"), "--workers: only with --matrix"),
        (("model", "-o", "x", "--explain-key", "--only", "a"), "--only, --explain-key: only with --matrix"),
        (("-o", "x"), "Missing argument 'MODEL'"),
        (("--matrix", "m.yaml"), "Missing option '-o'"),
        (("--matrix", "m.yaml", "-o", "x", "--workers", "0"), "--workers"),
        (("--matrix", "m.yaml", "-o", "x", "--stage", "time"), "--stage"),
    ],
)
def test_refusals(here: Path, requests: list[MatrixRequest], args: tuple[str, ...], message: str) -> None:
    done = run(*args)
    assert (done.exit_code, requests) == (2, [])
    assert message in done.stderr


def test_a_dry_run_writes_nothing(here: Path) -> None:
    done = run("--matrix", "m.yaml", "-o", "out", "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].startswith("2 planned in out")
    assert not (here / "out").exists()


def test_keys_are_explained_before_anything_is_built(here: Path) -> None:
    done = run("--matrix", "m.yaml", "-o", "out", "--explain-key")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny/cpu: known when it is built: its ops decide which timings count"
    assert any(line.split() == ["option.max_batch_size", "null"] for line in lines)
    found = json.loads(run("--matrix", "m.yaml", "-o", "out", "--explain-key", "--json").stdout)
    assert [e["title"] for e in found] == ["tiny/cpu", "tiny/h200"]
    assert found[1]["factors"]["target"] == "cuda:h200"
    assert not (here / "out").exists()


def test_a_file_with_problems(here: Path) -> None:
    (here / "m.yaml").write_text("model: {a: ./a}\ntargets: [tpu]")
    done = run("--matrix", "m.yaml", "-o", "out")
    assert done.exit_code == 2
    assert isinstance(done.exception, (SystemExit, UsageError))
    assert "m.yaml:1: model: unknown key, did you mean models?" in done.stderr
    assert "m.yaml:2: tpu: is no target" in done.stderr
    assert "hint: docs/matrix.md" in done.stderr
