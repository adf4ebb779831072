"""`tapeout weights`: write the weight file of a shared engine where the engine is used."""

from __future__ import annotations

from pathlib import Path

import click

from tapeout.cli.engine_argument import PRECISION, TARGET
from tapeout.cli.extras import weight_packages


@click.command("weights", short_help="Write the weight file of an engine with shared weights.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("model", required=False)
@click.option(
    "--dummy",
    type=click.IntRange(min=0),
    metavar="SEED",
    help="Random weights of the real shapes, for measuring: the engine's output means nothing.",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")
@TARGET
@PRECISION
def command(
    engine: Path,
    model: str | None,
    dummy: int | None,
    revision: str | None,
    target: str | None,
    precision: str | None,
) -> None:
    """Write the weights that ENGINE, built with --weights shared, expects beside it. Of an engine set, a
    directory, all weight files that its engines share and --target and --precision leave.

    MODEL is the checkpoint that ENGINE was built from: a Hugging Face directory, a hub id or a .gguf
    file. Another one is refused, with all tensors that do not fit. Where the right file is there already
    it is kept, and MODEL's values are not compared. The file is the one the build wrote, byte for byte;
    neither torch nor transformers is needed (pip install 'tapeout[weights]', and 'tapeout[gguf]' for a
    .gguf file).

    \b
    tapeout weights model.engine ./checkpoint
    tapeout weights sets/smollm2 ./checkpoint --precision bfloat16
    tapeout weights model.engine --dummy 1
    """
    if (model is None) == (dummy is None):
        raise click.UsageError("Give either MODEL, the checkpoint, or --dummy SEED.")
    if dummy is not None and revision is not None:
        raise click.UsageError("--revision belongs to MODEL: random weights have none.")
    with weight_packages("weights"):
        from tapeout.runtime.resolve_engine import weight_owners

        for owner in weight_owners(engine, target=target, precision=precision):
            if model is None:
                assert dummy is not None
                _write_dummy(owner, dummy)
            else:
                _write(owner, model, revision)


def _write(engine: Path, model: str, revision: str | None) -> None:
    from tapeout.cli.format import human_bytes
    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.progress import of_bytes
    from tapeout.compiler.weight_file import write_weights

    with choose_progress(silent=False).stage("weights", model) as stage:
        written = write_weights(
            engine,
            model,
            revision=revision,
            progress=of_bytes(stage),
        )
    note = "  was there already, checked and kept" if written.reused else ""
    click.echo(f"{written.path}  {human_bytes(written.path.stat().st_size)}{note}")


def _write_dummy(engine: Path, seed: int) -> None:
    from tapeout.cli.format import human_bytes
    from tapeout.compiler.dummy_weights import write_dummy_weights

    path = write_dummy_weights(engine, seed)
    click.echo(f"{path}  {human_bytes(path.stat().st_size)}  random weights, seed {seed}")
