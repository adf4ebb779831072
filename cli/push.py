"""`tapeout push`: an engine set into a store."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from tapeout.cli.streams import writing


@click.command("push", short_help="Copy an engine set into a store.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--tag", metavar="TAG", help="The name to give it there. [default: latest]")
@click.option("--verify", is_flag=True, help="Read every file back; damaged ones are replaced.")
@click.option(
    "--prune",
    is_flag=True,
    help="Afterwards remove files that no tag needs; nobody else may push to this URL meanwhile.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def command(directory: Path, url: str, tag: str | None, verify: bool, prune: bool, as_json: bool) -> None:
    """Copy the engine set in DIR to URL, the place of one model: s3://bucket/sets/model, gs://..., a
    directory as file:///..., or whatever else fsspec has a file system for.

    Files are named by their SHA-256 there: what the store has is not sent again. The tag moves last, so
    that readers find the old set or the new one, whole. Needs pip install 'tapeout[store]', and s3fs or
    gcsfs for these stores.

    \b
    tapeout push sets/smollm2 s3://models/smollm2
    tapeout push sets/smollm2 file:///srv/engines/smollm2 --tag v1
    """
    from tapeout.cli.format import human_bytes
    from tapeout.cli.progress import choose_progress
    from tapeout.runtime.store.address import parse_address
    from tapeout.runtime.store.prune import prune_store
    from tapeout.runtime.store.push import push_set

    address = parse_address(url, tag)
    with choose_progress(silent=as_json).stage("push", str(directory)) as stage:
        pushed = push_set(directory, address, verify=verify, tell=stage.update)
        pruned = prune_store(address, stage.update) if prune else None
        stage.update(f"{pushed.uploaded} of {pushed.files} files sent, {human_bytes(pushed.uploaded_bytes)}")
    with writing():
        if as_json:
            click.echo(json.dumps(asdict(pushed) | {"pruned": pruned and asdict(pruned)}, indent=2))
            return
        for name in pushed.replaced:
            click.echo(f"replaced {name}, which was damaged in the store")
        if pruned is not None:
            click.echo(f"pruned {pruned.files} files, {human_bytes(pruned.size_bytes)}")
        state = "now" if pushed.tag_moved else "as before"
        click.echo(f"{address.shown}@{address.tag} is {state} {pushed.model}, index {pushed.index_sha256}")
