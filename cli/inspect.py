"""`tapeout inspect`: what an engine holds."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tapeout.cli.paths import check_output
from tapeout.cli.streams import standard_output, writing


@click.command("inspect", short_help="Show what an engine holds.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.option("--program", "with_records", is_flag=True, help="List every launch record.")
@click.option("--verify", is_flag=True, help="Read the whole engine and compare all checksums.")
@click.option(
    "--onnx",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the fused graph as ONNX: custom domain `tapeout`, weights by reference.",
)
def command(engine: Path, as_json: bool, with_records: bool, verify: bool, onnx: Path | None) -> None:
    """Show the manifest, limits, program, tactics, sizes and parity of ENGINE.

    Times of tactics stand in ENGINE.report.json and are shown when it lies beside the engine.

    \b
    tapeout inspect smollm2.engine --verify
    tapeout inspect smollm2.engine --onnx smollm2.onnx
    """
    from tapeout.cli.engine_text import render
    from tapeout.cli.engine_view import describe
    from tapeout.runtime.engine import open_engine

    standard_output()
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
