"""How the command ends: exit codes, messages, tracebacks, start-up time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

from tapeout.cli.main import cli
from tapeout.plugins import errors


def fail(error: BaseException) -> Callable[[], NoReturn]:
    def callback() -> NoReturn:
        raise error

    return callback


def run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command when its work raises `error`."""
    command = click.Command("build", callback=fail(error))
    monkeypatch.setattr(type(cli), "get_command", lambda self, ctx, name: command)
    result = CliRunner().invoke(cli, ["build"])
    assert isinstance(result.exception, (SystemExit, type(None)))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TapeoutError("bad"), 1),
        (errors.UsageError("bad"), 2),
        (errors.EngineError("bad"), 3),
        (errors.EngineCorruptError("bad"), 3),
        (errors.EngineIncompatibleError("bad"), 3),
        (errors.CapacityError("bad"), 4),
        (errors.UnsupportedError("bad"), 5),
    ],
)
def test_every_error_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    exit_code, stdout, stderr = run_failing(monkeypatch, error)
    assert (exit_code, stdout) == (code, "")
    message, hint = stderr.splitlines()  # one that brings no hint of its own gets its kind's
    assert message == "error: bad"
    assert hint.startswith("hint: ")


def test_hint_stands_on_its_own_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, err = run_failing(monkeypatch, errors.UsageError("one\ntwo", hint="do this"))
    assert err == "error: one\ntwo\nhint: do this\n"


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run_failing(monkeypatch, KeyboardInterrupt())
    assert code == 130
    assert err.strip() == "interrupted"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")]
)
def test_out_of_memory_is_4(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    code, _, err = run_failing(monkeypatch, error)
    assert code == 4
    assert "out of memory" in err


def test_unexpected_error_is_one_line_and_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPEOUT_TRACEBACK", raising=False)
    code, out, err = run_failing(monkeypatch, KeyError("first\nsecond"))
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 2
    assert "unexpected KeyError" in err
    assert "TAPEOUT_TRACEBACK=1" in err


def test_traceback_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEOUT_TRACEBACK", "1")
    code, _, err = run_failing(monkeypatch, ValueError("odd"))
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("where it came from\n")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run_failing(monkeypatch, ModuleNotFoundError("No module", name="transformers"))
    assert code == 1
    assert "'transformers' is not installed" in err
    assert "tapeout[build,cpu]" in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["biuld"], "No such command 'biuld'"),
        (["build"], "Missing argument 'MODEL'"),
        (["build", "m", "--max-batchsize", "3"], "--max-batch-size"),
        (["build", "m", "--max-batch-size", "many"], "'many' is not a valid integer"),
        (["--log-level", "loud", "build"], "'loud' is not one of"),
    ],
)
def test_usage_errors_are_2_with_a_hint(args: list[str], expected: str) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "hint: see `tapeout" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("args", [["run", "missing.engine", "--prompt", "x"], ["inspect", "missing.engine"]])
def test_a_missing_engine_is_a_usage_error(args: list[str]) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2
    assert "error: engine missing.engine does not exist" in result.stderr
    assert "hint: " in result.stderr


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    result = CliRunner().invoke(cli, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"tapeout {version('tapeout')}\n"


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["build", "--help"], ["run", "-h"], ["inspect", "-h"]])
def test_help_goes_to_stdout_and_succeeds(args: list[str]) -> None:
    result = CliRunner().invoke(cli, args)
    assert result.stdout.startswith("Usage: tapeout")
    assert result.exit_code == 0


def test_without_a_command_the_help_is_shown() -> None:
    result = CliRunner().invoke(cli, [])
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_underscores_are_accepted_in_every_option() -> None:
    """A wrong value proves that the option itself was found under its other spelling."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        for param in command.params:
            for option in (o for o in param.opts if o.startswith("--") and "-" in o[2:]):
                underscored = "--" + option[2:].replace("-", "_")
                result = CliRunner().invoke(cli, [name, underscored])
                assert "No such option" not in result.stderr, (name, underscored)


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tapeout.cli.main import main\n"
        "sys.argv = ['tapeout', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'onnx', 'tensorrt', 'numpy', 'rich', 'yaml', 'tokenizers'}\n"
        "found = heavy & sys.modules.keys()\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    """The best of three: the machine may be busy, the command may not be slow."""
    command = [str(Path(sys.executable).with_name("tapeout")), "--help"]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0, seconds  # 0.3 s on an idle machine
