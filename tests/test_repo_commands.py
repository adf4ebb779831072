"""Makefile, continuous integration and documents say the same, and what they say works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tapeout.cli.main import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shell_lines(document: Path) -> list[str]:
    """Commands in a document's shell blocks, continued lines joined."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", document.read_text(), re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = (line.strip().removeprefix("$ ") for line in lines)
    return [line for line in commands if line and not line.startswith("#")]


def commands_below(group: click.Group) -> list[click.Command]:
    """Every command of the group and of the groups in it."""
    context, found = click.Context(group), []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += [command, *(commands_below(command) if isinstance(command, click.Group) else ())]
    return found


def tapeout_commands() -> list[str]:
    lines = [line for document in DOCUMENTS for line in shell_lines(document)]
    # Examples in the help texts count as documents.
    for command in commands_below(cli):
        lines += [line.strip() for line in (command.help or "").splitlines()]
    return [line for line in lines if re.match(r"tapeout [a-z-]", line)]


def parse(command: click.Command, args: list[str], parent: click.Context | None = None) -> None:
    """Parse like the real command, without running it."""
    context = command.make_context(command.name, args, parent=parent, resilient_parsing=False)
    if isinstance(command, click.Group):
        name, sub, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert sub is not None, name
        parse(sub, rest, context)


@pytest.mark.parametrize("line", tapeout_commands())
def test_documented_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = re.split(r"\s{3,}|[|>]", line)[0]
    args = shlex.split(line, comments=True)
    for word in args:
        if word.endswith((".yaml", ".json", ".jsonl")):  # read by the parser when it checks that they exist
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    try:
        parse(cli, args[1:])
    except click.exceptions.Exit as end:
        assert end.exit_code == 0


def test_there_are_commands_to_check() -> None:
    verbs = {line.split()[1] for line in tapeout_commands()}
    assert {"build", "run", "inspect"} <= verbs


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.M):
            assert target in targets, f"{document.name} names `make {target}`"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert re.search(r"^exec make test$", text, re.M)
    assert "make test" in shell_lines(ROOT / "README.md")


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    """A stand-in for Python 3.9: the check fails and -V tells its version."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.9.0" && exit 0\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "-C", str(ROOT), "env", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "error: tapeout needs Python 3.11 or newer" in done.stdout + done.stderr
    assert "Python 3.9.0" in done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()


def test_cli_document_is_current(tmp_path: Path) -> None:
    out = tmp_path / "cli.md"
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate_cli.py"), str(out)], check=True)
    assert out.read_text() == (ROOT / "docs" / "cli.md").read_text(), "run `make docs`"
