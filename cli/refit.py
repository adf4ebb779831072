"""`tapeout refit`: other weights of the same model in an engine that is there."""

from __future__ import annotations

from pathlib import Path

import click

from tapeout.cli.extras import weight_packages
from tapeout.cli.paths import check_output


@click.command("refit", short_help="Put the weights of a fine-tune into an engine.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--weights",
    "model",
    metavar="CHECKPOINT",
    required=True,
    help="Whose weights: a Hugging Face directory, a hub id or a .gguf file.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The engine to write, for an engine set its new directory. [default: ENGINE's name with .refit]",
)
@click.option(
    "--keep-text",
    is_flag=True,
    help="Keep ENGINE's tokenizer, chat template and defaults where the checkpoint's differ.",
)
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a hub id.")
def command(engine: Path, model: str, output: Path | None, keep_text: bool, revision: str | None) -> None:
    """Write an engine with the plan, tactics and kernels of ENGINE and the weights of CHECKPOINT, a
    fine-tune of the same config: nothing is traced, compiled or timed, and neither torch nor transformers
    is needed for it.

    Refused are a config that changes anything of the graph, tensors that are missing, extra, of another
    shape or type, weights that are not finite, and an engine whose first step gives no sound logits. That
    step needs the machine ENGINE is for; elsewhere the engine says that it was not verified. Of an engine
    set, all engines are refitted, and weights that they share are made once.

    \b
    tapeout refit smollm2.engine --weights ./my-finetune -o mine.engine
    tapeout refit sets/smollm2 --weights ./my-finetune -o sets/mine
    """
    with weight_packages("refit"):
        if engine.is_dir():
            from tapeout.runtime.engine_set.directory import open_engine_set

            open_engine_set(engine)  # an empty directory is none, whatever else is missing
            if output is None:
                raise click.UsageError("ENGINE is an engine set: give --output DIR, a new directory.")
            _refit_set(engine, model, output, keep_text, revision)
            return
        target = output or engine.with_name(f"{engine.stem}.refit{engine.suffix}")
        check_output(target, "--output", inputs=[engine])
        _refit(engine, model, target, keep_text, revision)


def _refit(engine: Path, model: str, output: Path, keep_text: bool, revision: str | None) -> None:
    from tapeout.cli.format import human_bytes
    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.progress import of_bytes
    from tapeout.compiler.refit import refit

    with choose_progress(silent=False).stage("refit", model) as stage:
        done = refit(
            engine,
            model,
            output,
            revision=revision,
            keep_text=keep_text,
            progress=of_bytes(stage),
        )
    for line in done.kept_text:
        click.echo(f"warning: the engine's text was kept: {line}", err=True)
    for path in done.files:
        click.echo(f"{path}  {human_bytes(path.stat().st_size)}")
    click.echo(f"weights: {done.checkpoint}")
    click.echo(f"built from: {done.built_from}")
    click.echo(f"outputs: {done.ran.text}")


def _refit_set(engines: Path, model: str, output: Path, keep_text: bool, revision: str | None) -> None:
    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.progress import of_bytes
    from tapeout.compiler.refit_set import refit_set

    with choose_progress(silent=False).stage("refit", model) as stage:
        done = refit_set(
            engines,
            model,
            output,
            revision=revision,
            keep_text=keep_text,
            progress=of_bytes(stage),
        )
        stage.update(f"{len(done.engines)} engines")
    for line in sorted({line for refitted in done.engines.values() for line in refitted.kept_text}):
        click.echo(f"warning: the engines' text was kept: {line}", err=True)
    for name, refitted in done.engines.items():
        click.echo(f"{output / name}  outputs: {refitted.ran.text}")
    click.echo(str(output))
