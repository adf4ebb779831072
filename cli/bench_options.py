"""What the `tapeout bench` commands share: options, output, opening the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapeout.cli import run_options
from tapeout.cli.paths import check_output
from tapeout.cli.streams import standard_output, writing
from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    from tapeout.runtime.engine import Manifest

FILE = click.Path(path_type=Path)
COUNT, NUMBER = click.IntRange(min=1), click.IntRange(min=0)
RATIO = click.FloatRange(0, 1, max_open=True)


def counts(context: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,8,32` as (1, 8, 32)."""
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if bad := [p for p in parts if not (p.isdecimal() and len(p) <= 10 and int(p) > 0)]:
        shown = ", ".join(map(repr, bad))
        raise click.BadParameter(f"{shown}, expected numbers of at least 1 such as 1,8,32", context, param)
    return tuple(dict.fromkeys(map(int, parts)))


def names(context: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`a,b` as ("a", "b")."""
    return tuple(part.strip() for part in (value or "").split(",") if part.strip())


OUTPUT = (
    click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the record as JSON, too."),
    click.option("--force", is_flag=True, help="Overwrite the file of --output."),
    click.option("--json", "as_json", is_flag=True, help="Print the record as JSON, nothing else."),
)
WORKLOAD = click.option(
    "--workload", type=FILE, metavar="FILE", help="Prompts and lengths of a workload file instead."
)
SEED = click.option("--seed", type=NUMBER, default=0, show_default=True, help="Of the random prompts.")
NO_ROOFLINE = click.option("--no-roofline", is_flag=True, help="Do not measure the memory's bandwidth.")


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of LLM among the flags that the user gave."""
    return {k: v for k, v in flags.items() if k in run_options.RUNTIME_NAMES and v is not None}


def excludes(option: str, **others: Any) -> None:
    """A usage error when the user gave one of `others` beside `option`."""
    source = click.get_current_context().get_parameter_source
    chosen = click.core.ParameterSource.DEFAULT
    if clash := [name for name in others if source(name) is not chosen]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in clash)
        raise click.UsageError(f"{option} and {flags} exclude each other: the file says it.")


def open_manifest(
    engine: Path, output: Path | None, force: bool, inputs: Iterable[Path | None] = ()
) -> Manifest:
    """The engine's manifest; where the record goes is checked against what is there and what is read."""
    from tapeout.runtime.engine import open_engine

    standard_output()
    with open_engine(engine, verify=False) as opened:
        if output is not None:
            check_output(output, "--output", inputs=[*opened.files, *(p for p in inputs if p)], stream=True)
            if output.is_file() and not force:
                raise UsageError(
                    f"--output: {str(output)!r} exists", hint="give --force to overwrite it, or another name"
                )
        return opened.manifest


def publish(
    record: dict[str, Any], text: Callable[[dict[str, Any]], str], output: Path | None, as_json: bool
) -> None:
    """Print a record as the user wants it, and write it to the file of --output."""
    from tapeout.cli.results import open_output

    document = json.dumps(record, indent=1)
    if output is not None:
        with open_output(output) as stream:
            stream.write(document + "\n")
    with writing():
        click.echo(document if as_json else text(record))
        if output is not None and not as_json:
            click.echo(f"wrote {output}")


def tell(text: str, silent: bool) -> None:
    """A line of progress on stderr."""
    if not silent:
        click.echo(text, err=True)
