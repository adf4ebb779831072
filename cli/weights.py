"""`tapeout weights`: write the weight file of a shared engine where the engine is used."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("weights", short_help="Write the weight file of an engine with shared weights.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--dummy",
    type=click.IntRange(min=0),
    required=True,
    metavar="SEED",
    help="Random weights of the real shapes, for measuring: the engine's output means nothing.",
)
def command(engine: Path, dummy: int) -> None:
    """Write the weights that ENGINE, built with --weights shared, expects beside it.

    \b
    tapeout weights model.engine --dummy 1
    """
    from tapeout.cli.format import human_bytes
    from tapeout.compiler.dummy_weights import write_dummy_weights

    path = write_dummy_weights(engine, dummy)
    click.echo(f"{path}  {human_bytes(path.stat().st_size)}  random weights, seed {dummy}")
