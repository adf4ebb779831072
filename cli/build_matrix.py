"""`tapeout build --matrix`: the flags of a build of many engines, and how its result is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tapeout.cli.format import human_bytes, table
from tapeout.cli.streams import writing

if TYPE_CHECKING:
    from tapeout.compiler.matrix.build_matrix import MatrixRequest
    from tapeout.compiler.matrix.results import MatrixReport

F = TypeVar("F", bound=Callable[..., Any])

#: Flags of a build that mean nothing for many engines, and what to do instead.
_OF_ONE = {
    "target": "name the targets in the file",
    "pack": "--stage compile writes packs",
    "dump": "build the engine by itself",
    "keep_onnx": "build the engine by itself",
    "timing_cache": "give --timings DIR, or timing-cache in the file",
    "revision": "give it in the file, below the model",
}
#: Flags that only a matrix has, with their defaults.
_OF_MANY: Mapping[str, Any] = {
    "stage": None, "timings": None, "only": (), "workers": None, "max_memory": None, "explain_key": False,
}  # fmt: skip


def matrix_options(function: F) -> F:
    """The flags of a matrix build; see `matrix_flags`."""
    options = (
        click.option(
            "--matrix",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE.yaml",
            help="Build all engines that a file asks for into the directory --output; those that changed.",
        ),
        click.option(
            "--stage",
            type=click.Choice(("compile", "finish")),
            help="Of a matrix: compile packs for GPUs without timings, or finish engines. [default: finish]",
        ),
        click.option(
            "--timings",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Of a matrix: timing caches, DIR/<model>/<engine>.json. [default: `timings` in --output]",
        ),
        click.option(
            "--only",
            multiple=True,
            metavar="PATTERN",
            help="Of a matrix: engines whose MODEL/NAME matches, for example 'smollm2/*'. May be repeated.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Of a matrix: build processes at once. [default: one a core]",
        ),
        click.option(
            "--max-memory",
            type=click.FloatRange(min=0, min_open=True),
            metavar="GIB",
            help="Of a matrix: memory that build processes may take. [default: 90% of what is free]",
        ),
        click.option(
            "--explain-key",
            is_flag=True,
            help="Of a matrix: print what the engines' content keys are made of; build nothing.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def take_matrix_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Take a matrix' own flags out of those of a build; refuse them where there is no matrix."""
    own = {name: flags.pop(name) for name in _OF_MANY}
    given = [name for name, value in own.items() if value != _OF_MANY[name]]
    if flags["matrix"] is None and given:
        dashed = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{dashed}: only with --matrix FILE.yaml.")
    return {"matrix": flags.pop("matrix"), **own}


def run_matrix(
    model: str | None,
    output: Path | None,
    config: Path | None,
    as_json: bool,
    own: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> int:
    """Build a matrix; returns the exit code. `flags`: options of all its engines that were given."""
    problems = [f"--{name.replace('_', '-')}: {why}" for name, why in _OF_ONE.items() if name in flags]
    if model is not None:
        problems.append(f"MODEL {model!r}: the models stand in the file")
    if config is not None:
        problems.append("--config: options stand in the file, below `defaults`")
    if problems:
        raise click.UsageError("not with --matrix:\n" + "\n".join(f"  {p}" for p in problems))
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output': the directory of the engines.")

    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.matrix.build_matrix import FINISH, MatrixRequest, build_matrix

    request = MatrixRequest(
        matrix=own["matrix"],
        output=output,
        stage=own["stage"] or FINISH,
        timings=own["timings"],
        only=tuple(own["only"]),
        flags={name: value for name, value in flags.items() if name != "dry_run"},
        workers=own["workers"],
        memory_bytes=None if own["max_memory"] is None else int(own["max_memory"] * 2**30),
        dry_run=bool(flags.get("dry_run")),
    )
    if own["explain_key"]:
        _explain(request, as_json)
        return 0
    report = build_matrix(request, choose_progress(silent=as_json))
    with writing():
        click.echo(json.dumps(report.to_json(), indent=2) if as_json else _summary(report))
    return report.exit_code


def _explain(request: MatrixRequest, as_json: bool) -> None:
    from tapeout.compiler.matrix.build_matrix import explain_keys

    found = explain_keys(request)
    with writing():
        if as_json:
            click.echo(json.dumps([vars(e) for e in found], indent=2))
            return
        for explained in found:
            key = explained.key or "known when it is built: its ops decide which timings count"
            click.echo(f"{explained.title}: {key}")
            click.echo(table([*sorted(explained.factors.items())]))


def _summary(report: MatrixReport) -> str:
    """Failures in full, then a line for each engine, then the counts."""
    lines = [f"warning: {text}" for text in report.warnings]
    for result in report.results:
        if result.status == "failed":
            lines.append(f"failed: {result.title}: {result.message}")
            lines += [f"hint: {result.hint}"] if result.hint else []
    rows = []
    for result in report.results:
        size = "" if result.size_bytes is None else human_bytes(result.size_bytes)
        seconds = f"{result.seconds:.1f} s" if result.seconds else ""
        rows.append((result.title, f"{result.status:<7} {size:>9} {seconds:>8}  {result.why}".rstrip()))
    counts = ", ".join(f"{n} {status}" for status, n in report.counts().items())
    return "\n".join(
        [*lines, table(rows), f"{counts or 'nothing'} in {report.output}, {report.seconds:.1f} s"]
    )
