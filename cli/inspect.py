"""`tapeout inspect`: what an engine holds."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tapeout.cli.engine_argument import PRECISION, TARGET, chosen_engine, engine_argument
from tapeout.cli.paths import check_output
from tapeout.cli.streams import standard_output, writing


@click.command("inspect", short_help="Show what an engine holds.")
@engine_argument
@TARGET
@PRECISION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.option("--program", "with_records", is_flag=True, help="List every launch record.")
@click.option("--verify", is_flag=True, help="Read the whole engine and compare all checksums.")
@click.option(
    "--onnx",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the fused graph as ONNX: custom domain `tapeout`, weights by reference.",
)
def command(
    engine: str,
    target: str | None,
    precision: str | None,
    as_json: bool,
    with_records: bool,
    verify: bool,
    onnx: Path | None,
) -> None:
    """Show the manifest, limits, program, tactics, sizes and parity of ENGINE.

    Times of tactics stand in ENGINE.report.json and are shown when it lies beside the engine. Of an
    engine set, its engines are listed and which of them this machine runs; --target, --precision,
    --program and --onnx show one engine of it.

    \b
    tapeout inspect smollm2.engine --verify
    tapeout inspect smollm2.engine --onnx smollm2.onnx
    tapeout inspect sets/smollm2
    tapeout inspect sets/smollm2 --target cuda:h200
    """
    from tapeout.runtime.store.address import is_url

    standard_output()
    one = target is not None or precision is not None or with_records or onnx is not None
    if not one and (is_url(engine) or Path(engine).is_dir()):
        _show_set(engine, as_json, verify)
        return
    with chosen_engine(engine, target, precision) as path:
        _show_engine(path, as_json, with_records, verify, onnx)


def _show_set(engines: str, as_json: bool, verify: bool) -> None:
    from tapeout.cli.set_view import describe_set, describe_stored, render_set
    from tapeout.runtime.engine_set.directory import open_engine_set
    from tapeout.runtime.store.address import is_url, parse_address
    from tapeout.runtime.store.remote import open_store

    if is_url(engines):
        if verify:
            raise click.UsageError(
                "--verify reads files that are here; `tapeout pull` checks what it fetches."
            )
        address = parse_address(engines)
        description = describe_stored(open_store(address).read_set().index, address.text())
    else:
        description = describe_set(open_engine_set(Path(engines)), verify=verify)
    with writing():
        click.echo(json.dumps(description, indent=2) if as_json else render_set(description))


def _show_engine(engine: Path, as_json: bool, with_records: bool, verify: bool, onnx: Path | None) -> None:
    from tapeout.cli.engine_text import render
    from tapeout.cli.engine_view import describe
    from tapeout.runtime.engine import open_engine

    with open_engine(engine, verify=False) as opened:
        if onnx is not None:
            check_output(onnx, "--onnx", inputs=opened.files)
        if verify:
            opened.verify_all()
        description = describe(opened, verified=verify, with_records=with_records)
    if onnx is not None:
        from tapeout.compiler.onnx_export import export_engine

        export_engine(engine, onnx)
        description["onnx"] = str(onnx)
    with writing():
        click.echo(json.dumps(description, indent=2) if as_json else render(description))
