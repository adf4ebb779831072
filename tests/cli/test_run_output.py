"""Where `tapeout run` writes and what it must not: devices, links, inputs, broken standard streams."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli

TAPEOUT = str(Path(sys.executable).with_name("tapeout"))


@pytest.fixture
def run(alphabet: Path) -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(cli, ["run", str(alphabet), *args])


def ok(result: Result) -> Result:
    assert result.exit_code == 0, result.stderr
    return result


def test_a_device_is_written_to_and_never_replaced(run: Callable[..., Result], tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    result = run("--prompt", "x", "--output", str(full))
    assert result.exit_code == 1
    assert "cannot be written: No space left on device" in result.stderr
    ok(run("--prompt", "x", "--output", "/dev/null"))
    for device in ("/dev/full", "/dev/null"):
        assert stat.S_ISCHR(Path(device).stat().st_mode)
    assert full.is_symlink()


def test_a_fifo_and_an_open_descriptor_take_results(alphabet: Path, tmp_path: Path) -> None:
    fifo, log = tmp_path / "fifo", tmp_path / "log"
    os.mkfifo(fifo)
    command = [TAPEOUT, "run", str(alphabet), "--prompt", "x", "--output"]
    with subprocess.Popen([*command, str(fifo)]) as process:
        assert json.loads(fifo.read_text())["text"] == "yz"
    assert process.returncode == 0
    assert fifo.is_fifo()
    log.write_text("before\n")
    with log.open("a") as stream:
        subprocess.run([*command, "/proc/self/fd/1"], stdout=stream, check=True)
    first, second = log.read_text().splitlines()
    assert (first, json.loads(second)["text"]) == ("before", "yz")


def test_behind_a_link_the_file_is_replaced(run: Callable[..., Result], tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "out.jsonl", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to("real/out.jsonl")
    for _ in range(2):  # first it does not exist
        ok(run("--prompt", "x", "--output", str(link)))
        assert link.is_symlink()
        assert json.loads(real.read_text())["text"] == "yz"
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert run("--prompt", "x", "--output", str(loop)).exit_code == 2


def test_a_long_file_name_is_no_problem(run: Callable[..., Result], tmp_path: Path) -> None:
    target = tmp_path / ("é" * 127)  # 254 bytes
    ok(run("--prompt", "x", "--output", str(target)))
    assert target.is_file()


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link"])
@pytest.mark.parametrize("victim", ["engine", "input"])
def test_an_input_is_not_overwritten(alphabet: Path, tmp_path: Path, victim: str, kind: str) -> None:
    engine, source = tmp_path / "t.engine", tmp_path / "in.jsonl"
    engine.write_bytes(alphabet.read_bytes())
    source.write_text('{"prompt": "x"}')
    read = engine if victim == "engine" else source
    before, target = read.read_bytes(), tmp_path / "other"
    if kind == "same":
        target = read
    elif kind == "symlink":
        target.symlink_to(read)
    else:
        target.hardlink_to(read)
    args = ["run", str(engine), "--input", str(source), "--output", str(target)]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2, result.stderr
    assert "would be overwritten" in result.stderr
    assert read.read_bytes() == before


def shell(line: str, alphabet: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A shell line in which $RUN is `tapeout run ENGINE`."""
    return subprocess.run(
        ["bash", "-c", line.replace("$RUN", f"{TAPEOUT} run {alphabet}")],
        capture_output=True,
        check=False,
        env={**os.environ, **env},
        timeout=60,
    )


def test_a_redirected_input_is_not_overwritten(alphabet: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}')
    done = shell(f"$RUN --input - -o {source} <{source}", alphabet)
    assert done.returncode == 2, done.stderr
    assert source.read_text() == '{"prompt": "x"}'


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("$RUN <&-", 2, "standard input is closed"),
        ("$RUN --input - <&-", 2, "standard input is closed"),
        ("$RUN -p x >&-", 2, "standard output is closed"),
        ("$RUN -p x >/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("$RUN -p x --json >/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("$RUN --help >/dev/full", 1, "cannot be written: No space left on device"),
        ("$RUN -p x -o /dev/null >&- <&- 2>/dev/null", 0, ""),
        ("$RUN -p '' 2>/dev/full", 2, ""),
        ("$RUN -p $'\\xff'", 2, "is not UTF-8 text"),
    ],
)
def test_broken_standard_streams(alphabet: Path, line: str, code: int, expected: str) -> None:
    done = shell(line, alphabet)
    errors = done.stderr.decode()
    assert done.returncode == code, errors
    assert expected in errors
    for sign in ("unexpected", "Traceback", "Exception ignored"):
        assert sign not in errors


def test_json_does_not_depend_on_the_locale(alphabet: Path) -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell("$RUN -p é --json", alphabet, **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("ascii"))["prompt"] == "é"


def test_text_that_the_output_cannot_hold_is_escaped(alphabet: Path) -> None:
    done = shell("$RUN -p é -p b", alphabet, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rb"--- 1 of 2: \xe9 ---")
