"""`tapeout pull`: engines of a set out of a store."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapeout.cli.engine_argument import PRECISION, TARGET
from tapeout.cli.streams import writing

if TYPE_CHECKING:
    from tapeout.runtime.store.address import SetAddress
    from tapeout.runtime.store.pull import Pulled, Wanted


@click.command("pull", short_help="Fetch engines of a set from a store.")
@click.argument("url")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Fetch into DIR, not the cache."
)
@click.option("--tag", metavar="TAG", help="Which set of the store, as URL@TAG. [default: latest]")
@TARGET
@PRECISION
@click.option("--all", "everything", is_flag=True, help="Engines for all machines.")
@click.option(
    "--cache-size",
    metavar="SIZE",
    help="Most the cache may hold, such as 50GB; what was used longest ago goes. "
    "[default: TAPEOUT_CACHE_BYTES, else the disk's size]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(
    url: str,
    output: Path | None,
    tag: str | None,
    target: str | None,
    precision: str | None,
    everything: bool,
    cache_size: str | None,
    as_json: bool,
) -> None:
    """Fetch the engine for this machine, with its weights, from the set at URL, and print the directory that
    now is an engine set: one in the cache (TAPEOUT_CACHE_DIR), which `tapeout run URL` uses too, or DIR.

    Everything is checked against its SHA-256. A download that was stopped goes on where it stopped, and
    what several engines or processes want is fetched once. Needs pip install 'tapeout[store]'.

    \b
    tapeout pull s3://models/smollm2
    tapeout pull https://example.org/smollm2 -o smollm2 --target cuda:h200
    """
    from tapeout.cli.progress import choose_progress
    from tapeout.runtime.store.address import parse_address
    from tapeout.runtime.store.options import parse_bytes
    from tapeout.runtime.store.pull import Wanted

    if output is not None and cache_size is not None:
        raise click.UsageError("--cache-size and --output exclude each other: DIR is no cache.")
    address = parse_address(url, tag)
    limit = None if cache_size is None else parse_bytes(cache_size, "--cache-size")
    with choose_progress(silent=as_json).stage("pull", address.text()) as stage:
        pulled = _pull(address, output, Wanted(target, precision, everything), limit, stage)
        stage.update(f"{len(pulled.engines)} engines")
    with writing():
        if as_json:
            engines = [asdict(e) | {"versions": dict(e.versions)} for e in pulled.engines]
            data = {"directory": str(pulled.directory), "index_sha256": pulled.index_sha256}
            click.echo(json.dumps(data | {"engines": engines}, indent=2))
            return
        for entry in pulled.engines:
            click.echo(f"{entry.file}  {entry.target}  {entry.precision}", err=True)
        click.echo(str(pulled.directory))


def _pull(address: SetAddress, output: Path | None, wanted: Wanted, limit: int | None, stage: Any) -> Pulled:
    from tapeout.runtime.store.cache import Cache
    from tapeout.runtime.store.options import cache_limit, cache_root
    from tapeout.runtime.store.pull import pull_into_directory, pulled_into_cache

    if output is not None:
        return pull_into_directory(address, output, wanted, stage.update)
    cache = Cache(cache_root(), cache_limit() if limit is None else limit)
    with pulled_into_cache(address, cache, wanted, stage.update) as pulled:
        return pulled
