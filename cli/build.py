"""`tapeout build`: a model into an engine file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tapeout.cli.build_matrix import matrix_options, run_matrix, take_matrix_flags
from tapeout.cli.format import human_bytes, table
from tapeout.cli.paths import check_output
from tapeout.cli.streams import writing
from tapeout.compiler.options import DTYPE_ALIASES, FIELDS

if TYPE_CHECKING:
    from tapeout.compiler.options import BuildOptions
    from tapeout.compiler.report import BuildReport

F = TypeVar("F", bound=Callable[..., Any])
KINDS: dict[type, Any] = {int: click.INT, str: click.STRING, Path: click.Path(path_type=Path)}


class _Choice(click.Choice):  # type: ignore[type-arg]
    """Values and their other names; those that a build refuses, for a reason of its own, pass unnamed."""

    def __init__(self, values: Sequence[str], refused: Sequence[str], aliases: Mapping[str, str]) -> None:
        super().__init__([*values, *(alias for alias, value in aliases.items() if value in values)])
        self._refused = {*refused, *(alias for alias, value in aliases.items() if value in refused)}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._refused else super().convert(value, param, ctx)


def build_options(function: F) -> F:
    """A flag for every field of BuildOptions; flags that are not given stay None."""
    for name, option in reversed(list(FIELDS.items())):
        dashed, facts = name.replace("_", "-"), option.metadata
        if facts["kind"] is bool:
            # An option that is on by default is turned off: `--no-verify`.
            flag = f"--{dashed}/--no-{dashed}"
            text = facts["help"] + (f" [default: --{dashed}]" if option.default else "")
            function = click.option(flag, name, default=None, help=text)(function)
            continue
        kind = KINDS[facts["kind"]]
        if facts["choices"]:
            kind = _Choice(facts["choices"], facts["refused"], DTYPE_ALIASES if name == "dtype" else {})
        text = facts["help"]
        if option.default is not None:
            text += f" [default: {option.default}]"
        function = click.option(
            f"--{dashed}", name, type=kind, metavar=facts["metavar"], default=None, help=text
        )(function)
    return function


@click.command("build", short_help="Build a model into an engine file.")
@click.argument("model", required=False)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The engine to write; with --matrix the directory of all engines.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.yaml",
    help="Options from a file, with the names of the flags. A flag wins over the file.",
)
@build_options
@matrix_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document, nothing else.")
def command(model: str | None, output: Path | None, config: Path | None, as_json: bool, **flags: Any) -> int:
    """Build MODEL, a Hugging Face directory, a hub id or a .gguf file, into an engine; or with --matrix many
    engines of many models.

    \b
    tapeout build HuggingFaceTB/SmolLM2-135M-Instruct -o smollm2.engine
    tapeout build model.gguf -o model.engine --dtype bf16 --max-batch-size 16
    tapeout build ./checkpoint -o model.engine --dry-run
    tapeout build ./checkpoint --target cuda:h200 --pack model.pack
    tapeout build --matrix engines.yaml -o engines
    """
    own = take_matrix_flags(flags)
    given = {name: value for name, value in flags.items() if value is not None}
    if own["matrix"] is not None:
        return run_matrix(model, output, config, as_json, own, given)
    if model is None:
        raise click.UsageError("Missing argument 'MODEL' (or --matrix FILE.yaml).")

    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.options_file import load_options

    options = load_options(config, given)
    if options.pack is not None:
        _build_pack(model, output, options, config, as_json)
        return 0
    if output is None:
        if not options.dry_run:
            raise click.UsageError("Missing option '-o' / '--output': where to write the engine.")
        output = Path(default_name(model))
    if not options.dry_run:
        check_output(output, "--output")

    progress = choose_progress(silent=as_json)
    changed = {k: v for k, v in options.effective().items() if v != FIELDS[k].default}
    progress.info(f"options: {', '.join(f'{k}={v}' for k, v in changed.items()) or 'defaults'}")

    from tapeout.compiler.build import build

    inputs = () if config is None else (config,)
    report = build(model, output, options, progress, inputs)
    with writing():
        click.echo(json.dumps(report.to_json(), indent=2) if as_json else summary(report))
    return 0


def _build_pack(
    model: str, output: Path | None, options: BuildOptions, config: Path | None, as_json: bool
) -> None:
    """Write a pack instead of an engine."""
    from tapeout.cli.progress import choose_progress

    if output is not None or options.dry_run:
        other = "--dry-run" if output is None else "--output"
        raise click.UsageError(f"--pack writes a pack and no engine, it does not go with {other}.")
    if options.require_timed:
        raise click.UsageError(
            "--require-timed is for engines, not for --pack: a pack holds what is yet untimed."
        )
    check_output(options.pack, "--pack")  # type: ignore[arg-type]

    from tapeout.compiler.build_pack import build_pack

    report = build_pack(model, options, choose_progress(silent=as_json), () if config is None else (config,))
    with writing():
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=2))
            return
        lines = [
            f"{report.candidates} candidates at {report.entries} places for {report.target}, {report.dtype}",
            f"wrote, with {report.kernels} kernels and {report.segments} TensorRT segments",
            table([(report.pack.name, human_bytes(report.file_bytes))]),
            *([f"no TensorRT segments: {report.no_segments}"] if report.no_segments else []),
            f"{sum(report.stage_seconds.values()):.1f} s",
            f"on the GPU: tapeout time {report.pack} -o CACHE.json",
        ]
        click.echo("\n".join(lines))


def default_name(model: str) -> str:
    """`org/Name-1B` and `dir/Name-1B.gguf` both give `Name-1B.engine`."""
    name = re.sub(r"\.gguf$", "", Path(model).name) or "model"
    return f"{name}.engine"


def summary(report: BuildReport) -> str:
    """The last lines of a build: what it is good for, files, seconds, peak memory."""
    lines = [f"warning: {text}" for text in report.warnings]
    limits, memory = report.limits, report.memory
    lines += [
        f"engine for {report.target}, {report.dtype}, quantize {report.quantize}",
        table(
            [
                ("max-batch-size", f"{limits.max_batch_size} requests"),
                ("max-num-tokens", f"{limits.max_num_tokens} tokens a step"),
                ("max-seq-len", f"{limits.max_seq_len} tokens a request"),
                ("tokens-per-page", f"{limits.tokens_per_page} tokens"),
            ]
        ),
        "memory at these limits",
        table(
            [
                ("weights", human_bytes(memory.weights_bytes)),
                ("arena", human_bytes(memory.arena_bytes)),
                *([("workspace", human_bytes(memory.workspace_bytes))] if memory.workspace_bytes else []),
                ("KV cache", human_bytes(memory.kv_cache_bytes)),
                ("total", f"{human_bytes(memory.total_bytes)}  ({memory.advice()})"),
            ]
        ),
    ]
    if not report.dry_run:
        lines.append(f"parity: {report.parity.get('verdict', 'unknown')}")
    lines.append("would write" if report.dry_run else "wrote")
    lines += [table([(name, human_bytes(size)) for name, size in report.file_bytes.items()])]
    seconds = sum(report.stage_seconds.values())
    lines.append(f"{seconds:.1f} s, peak memory {human_bytes(report.peak_memory_bytes)}")
    return "\n".join(lines)
