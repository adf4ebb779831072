"""`tapeout refit`, and other commands, in this process."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from tapeout.cli.main import cli


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])
