"""The ENGINE that a command runs: a file, a directory that is an engine set, or a set's URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

TARGET = click.option(
    "--target",
    metavar="TARGET",
    help="Of an engine set: the engine for this target, such as cuda:h200, cuda:sm_90 or cpu. "
    "[default: the one for this machine]",
)
PRECISION = click.option(
    "--precision",
    metavar="NAME",
    help="Of an engine set: the engine of this precision, such as bfloat16 or int8-dynamic.",
)
#: A string: a path type would make `s3:/` of `s3://`.
engine_argument = click.argument("engine")


def chooses_engine(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --target and --precision, and calls `command` with the file they lead to as `engine`."""

    @wraps(command)
    def with_file(*, engine: str, target: str | None, precision: str | None, **options: Any) -> Any:
        with chosen_engine(engine, target, precision) as path:
            return command(engine=path, **options)

    return TARGET(PRECISION(with_file))


@contextmanager
def chosen_engine(engine: str, target: str | None, precision: str | None) -> Iterator[Path]:
    """See `runtime.resolve_engine.resolved_engine`; tells on stderr what is being fetched."""
    from tapeout.runtime.resolve_engine import resolved_engine
    from tapeout.runtime.store.address import is_url

    if not is_url(engine):
        with resolved_engine(engine, target=target, precision=precision) as path:
            yield path
        return
    from tapeout.cli.progress import choose_progress

    with choose_progress(silent=False).stage("fetch", engine) as stage:
        resolved = resolved_engine(engine, target=target, precision=precision, progress=stage.update)
        path = resolved.__enter__()
    try:
        yield path
    finally:
        resolved.__exit__(None, None, None)
