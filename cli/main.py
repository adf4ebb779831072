"""The `tapeout` command. Each subcommand is a file of this folder that calls one function."""

from __future__ import annotations

import logging
from importlib import import_module

import click

from tapeout.cli import streams
from tapeout.cli.group import RootGroup, end_on_sigterm

#: Command name to its module; a module loads when its command or the list of commands is asked for.
COMMANDS = {
    "build": "tapeout.cli.build",
    "run": "tapeout.cli.run",
    "bench": "tapeout.cli.bench",
    "simulate": "tapeout.cli.simulate",
    "explain": "tapeout.cli.explain",
    "inspect": "tapeout.cli.inspect",
    "weights": "tapeout.cli.weights",
    "refit": "tapeout.cli.refit",
    "time": "tapeout.cli.time",
    "push": "tapeout.cli.push",
    "pull": "tapeout.cli.pull",
    "models": "tapeout.cli.models",
}
LOG_LEVELS = ("debug", "info", "warning", "error")


class _Commands(RootGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command


@click.group(
    "tapeout",
    cls=_Commands,
    # Users of other toolchains type --max_batch_size; both spellings name the same option.
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(package_name="tapeout", message="%(prog)s %(version)s")
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    show_default=True,
    help="Least severe log line to print on stderr.",
)
def cli(log_level: str) -> None:
    """Build language models into engine files and run them.

    \b
    tapeout build MODEL -o FILE   a Hugging Face model or a GGUF file into an engine
    tapeout run FILE --prompt X   generate text with an engine
    tapeout bench latency FILE    measure an engine
    tapeout simulate WORKLOAD     the schedulers on a workload, without a model
    tapeout explain TRACE         what was scheduled in a run, and why
    tapeout inspect FILE          what an engine holds
    tapeout weights FILE          the weight file of an engine that shares it
    tapeout refit FILE            the weights of a fine-tune in an engine
    tapeout time FILE -o CACHE    time the tactics of a pack on a GPU
    tapeout push DIR URL          an engine set into a store
    tapeout pull URL              engines of a set out of a store
    tapeout models                which model families work

    Exit codes: 0 success, 1 unexpected failure, 2 usage, 3 unusable engine, 4 out of memory,
    5 unsupported model, dtype or target, 130 interrupted, 143 terminated.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def main() -> None:
    """Entry point of the installed command; exits with the command's code."""
    streams.prepare()
    end_on_sigterm()
    cli.main(prog_name=cli.name)
