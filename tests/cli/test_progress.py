"""Progress of a build: plain lines, a live terminal, silence."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tapeout.cli.progress import PlainProgress, RichProgress, choose_progress
from tapeout.compiler.progress import Progress, SilentProgress


def work(progress: Progress, fail: bool = False) -> None:
    with progress.stage("trace", "30 layers") as stage:
        stage.update("[bold] 210 nodes")
        if fail:
            raise ValueError("broken")
    progress.info("a [line]")


def rich_output(fail: bool, terminal: bool) -> str:
    text = io.StringIO()
    progress = RichProgress(Console(file=text, force_terminal=terminal, width=80, highlight=False))
    try:
        work(progress, fail)
    except ValueError:
        assert fail
    return text.getvalue()


def test_rich_shows_what_is_done_and_takes_no_markup_from_details() -> None:
    out = rich_output(fail=False, terminal=False)
    assert "✓ trace" in out
    assert "[bold] 210 nodes" in out
    assert "a [line]" in out


def test_rich_marks_a_failed_stage() -> None:
    out = rich_output(fail=True, terminal=False)
    assert "✗ trace" in out
    assert "✓" not in out


def test_rich_gives_the_cursor_back_after_a_failure() -> None:
    out = rich_output(fail=True, terminal=True)
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


def test_plain_lines_mark_a_failed_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"):
        work(PlainProgress(), fail=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["trace ... 30 layers", "trace failed"]


def test_plain_lines_tell_how_far_a_long_stage_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    progress = PlainProgress(clock=lambda: now)
    with progress.stage("tactics", "cuda:h200") as stage:
        for count in range(1, 101):  # one a second, and for the last half a minute none
            now += 1
            stage.update(f"{min(count, 70)} of 70 kernels compiled")
        stage.update("all timed")
    assert capsys.readouterr().err.splitlines() == [
        "tactics ... cuda:h200",
        *(f"tactics ... {count} of 70 kernels compiled" for count in range(10, 71, 10)),
        "tactics ... all timed",
        "tactics       100.00 s  all timed",
    ]


def test_plain_lines_of_a_quick_stage_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with PlainProgress(clock=lambda: now).stage("write") as stage:
        for count in range(1000):
            stage.update(f"{count} of 1000 weights")
            now += 0.0099
    assert capsys.readouterr().err.splitlines() == [
        "write ...",
        "write           9.90 s  999 of 1000 weights",
    ]


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(SilentProgress())
    assert capsys.readouterr() == ("", "")


def test_progress_is_chosen_by_silence_terminal_and_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_progress(silent=True), SilentProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert isinstance(choose_progress(silent=False), PlainProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(choose_progress(silent=False), RichProgress)
