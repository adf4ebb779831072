"""`tapeout time`: check and time the tactics of a pack on a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tapeout.cli.segment_text import regions_lines
from tapeout.cli.streams import writing

if TYPE_CHECKING:
    from tapeout.compiler.tactics.gpu_timed_pack import TimedPack

_SHOWN = 20  # lines about lost candidates


@click.command("time", short_help="Time the tactics of a pack on a GPU.")
@click.argument("pack", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="CACHE.json",
    help="The timing cache to write; timings it holds already are kept.",
)
@click.option(
    "--timing-cache",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="EARLIER.json",
    help="Timings of the same GPU that CACHE.json gets too, where it has none of its own.",
)
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print all times as one JSON document, nothing else.")
def command(pack: Path, output: Path, timing_cache: Path | None, device: int, as_json: bool) -> None:
    """Check and time the tactics of PACK, which `tapeout build --pack FILE` wrote, on this machine's GPU:
    each by itself, then the best of each op in whole steps, then TensorRT's segments of whole regions
    against the best of our kernels in a row. Segments that were timed are kept in CACHE.json.segments.

    Needs the runtime and cuda-bindings only. A tactic that is wrong, crashes or hangs is lost, with
    the reason in the cache; the engine is then built with `tapeout build --timing-cache CACHE.json`.

    \b
    tapeout time model.pack -o h200.json
    tapeout time model.pack -o h200.json --device 1 --json
    tapeout time model.pack -o new.json --timing-cache h200.json
    """
    from tapeout.cli.progress import choose_progress
    from tapeout.compiler.time_into_cache import time_into_cache

    with choose_progress(silent=as_json).stage("time", str(pack)) as stage:
        done = time_into_cache(pack, output, earlier_path=timing_cache, device=device, progress=stage.update)
        stage.update(f"{done.timed} of {done.pack.num_candidates} candidates")
    with writing():
        click.echo(json.dumps(done.to_json(), indent=2) if as_json else _summary(done, output))


def _summary(done: TimedPack, output: Path) -> str:
    lines = [f"warning: skipped {title}: {why}" for title, why in done.skipped.items()]
    # A tactic is often lost everywhere for one reason, which is told once.
    places: dict[tuple[str, str], list[str]] = {}
    for title, tactic, reason in done.lost:
        places.setdefault((tactic, reason), []).append(title)
    lost = [
        f"lost: {tactic} {f'at {len(titles)} places' if len(titles) > 1 else f'of {titles[0]}'}: {reason}"
        for (tactic, reason), titles in places.items()
    ]
    lines += lost[:_SHOWN]
    if len(lost) > _SHOWN:
        lines.append(f"and {len(lost) - _SHOWN} more, see {output}")
    lines += [step.text() for step in done.steps]
    if done.regions:
        lines += regions_lines([asdict(region) for region in done.regions])
    lines.append(
        f"{done.gpu.text()}: {done.timed} of {done.pack.num_candidates} candidates timed, {len(done.lost)} "
        f"lost, {done.times.restarts} restarts, {done.times.seconds:.1f} s"
    )
    lines.append(f"wrote {output}")
    return "\n".join(lines)
