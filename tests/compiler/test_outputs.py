"""What a build may write to: refused before anything is done, and links keep what they are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tapeout.compiler.files as files
from tapeout.compiler.files import check_output, remove_leftovers, temporary_file, uninterrupted, write_text
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.outputs import check_outputs
from tapeout.plugins.errors import UsageError


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [make_fifo, make_link_to_device, make_loop])
@pytest.mark.parametrize("name", ["m.engine", "m.engine.report.json"])
def test_what_is_no_regular_file_is_refused_and_stays(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)
    before = (tmp_path / name).lstat()
    with pytest.raises(UsageError, match=r"is not a regular file|cannot be written"):
        check_outputs(tmp_path / "m.engine", BuildOptions())
    assert (tmp_path / name).lstat().st_ino == before.st_ino


def test_a_device_is_refused() -> None:
    with pytest.raises(UsageError, match="/dev/null is not a regular file"):
        check_output("/dev/null")
    with pytest.raises(UsageError, match="device, pipe or socket"):
        BuildOptions(timing_cache=Path("/dev/null"))


def test_a_link_to_a_file_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for text in ("new", "newer"):  # a link to nothing yet, then to a file
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    assert len(list(tmp_path.iterdir())) == 2


def test_names_that_are_too_long_are_usage_errors(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 5000)
    with pytest.raises(UsageError):
        check_outputs(long, BuildOptions())
    for name in ("timing_cache", "dump"):
        with pytest.raises(UsageError, match=name):
            BuildOptions(**{name: long})


@pytest.mark.parametrize("dump", ["/dev/null", "/dev/null/x", "/proc/x"])
def test_a_dump_that_cannot_be_made_is_refused(tmp_path: Path, dump: str) -> None:
    with pytest.raises(UsageError, match="dump"):
        check_outputs(tmp_path / "e", BuildOptions(dump=Path(dump), dry_run=True))


def test_a_dump_that_can_be_made_is_left_to_the_build(tmp_path: Path) -> None:
    check_outputs(tmp_path / "e", BuildOptions(dump=tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


class TestApart:
    def test_outputs_are_different_files(self, tmp_path: Path) -> None:
        for name in ("timing_cache", "dump"):
            for same in ("e", "e.report.json"):
                with pytest.raises(UsageError, match="would be lost"):
                    check_outputs(tmp_path / "e", BuildOptions(**{name: tmp_path / same}))

    @pytest.mark.parametrize("link", [os.symlink, os.link])
    def test_an_input_is_known_under_every_name(
        self, tmp_path: Path, link: Callable[[Path, Path], None]
    ) -> None:
        (tmp_path / "input").write_text("kept")
        link(tmp_path / "input", tmp_path / "e")
        link(tmp_path / "input", tmp_path / "f.report.json")
        for output in ("input", "e", "f"):
            with pytest.raises(UsageError, match=r"an input of the build .*would be lost"):
                check_outputs(tmp_path / output, BuildOptions(), [tmp_path / "input"])
        with pytest.raises(UsageError, match=r"timing cache .* is also an input"):
            check_outputs(tmp_path / "g", BuildOptions(timing_cache=tmp_path / "e"), [tmp_path / "input"])


def test_leftovers_go_and_files_at_work_stay(tmp_path: Path) -> None:
    left = tmp_path / ".0123456789abcdef.weights.safetensors.00.tmp"
    left.touch()
    with temporary_file(tmp_path / "fedcba9876543210.weights.safetensors") as (alive, _):
        remove_leftovers(tmp_path / "*.weights.safetensors")
        assert (left.exists(), alive.exists()) == (False, True)


def test_an_interrupt_right_after_the_file_was_made_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fdopen", interrupted)
    with pytest.raises(KeyboardInterrupt), temporary_file(tmp_path / "e"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_signals_wait_for_the_end() -> None:
    done = []

    def step() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == ["all"]
    with pytest.raises(KeyboardInterrupt):  # and the handler is back
        signal.raise_signal(signal.SIGINT)
