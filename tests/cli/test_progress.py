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


def test_silent_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work(SilentProgress())
    assert capsys.readouterr() == ("", "")


def test_progress_is_chosen_by_silence_terminal_and_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_progress(silent=True), SilentProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert isinstance(choose_progress(silent=False), PlainProgress)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(choose_progress(silent=False), RichProgress)
