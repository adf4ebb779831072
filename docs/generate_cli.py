"""Write docs/cli.md from the commands themselves: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from tapeout.cli.main import cli

HEADER = """# The command line

Written by `make docs` from the commands; change those, not this file.
Every option may be typed with underscores too: `--max_batch_size` is `--max-batch-size`.
"""


def section(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    # A fixed width: the file must not depend on the terminal it was written from.
    width = {"max_content_width": 100, "terminal_width": 100}
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings | width)
    text = re.sub(r" +$", "", command.get_help(context), flags=re.M)
    parts = [f"## {context.command_path}\n\n```text\n{text}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            parts.append(section(found, child, context))
    return "\n".join(parts)


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("cli.md")
    out.write_text(HEADER + "\n" + section(cli, "tapeout"))
