"""From what a user names, a file, a directory or a URL, to the engine file that runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine_set.choose import asked_for, listing
from tapeout.runtime.engine_set.directory import open_engine_set
from tapeout.runtime.store.address import is_url, parse_address, shown_url

logger = logging.getLogger("tapeout")


@contextmanager
def resolved_engine(
    engine: str | os.PathLike[str],
    *,
    target: str | None = None,
    precision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Path]:
    """The engine file to run, for as long as the context lasts.

    Args:
        engine: an engine file, taken as it is; the directory of an engine set; or the URL of one in a
            store, which is fetched into the cache and stays there meanwhile.
        target, precision: choose among a set's engines (`choose_engine` has the rules).
        progress: told what is being fetched.

    Raises:
        UsageError: nothing is there, a file was given together with a choice, or the choice is not clear.
        EngineError: the set is damaged, or has nothing for this machine.
    """
    if is_url(os.fspath(engine)):
        with _fetched(os.fspath(engine), target, precision, progress) as path:
            yield path
        return
    path = Path(engine)
    if not _is_directory(path):
        _check_no_choice(path, target, precision)
        yield path
        return
    engines = open_engine_set(path)
    path = engines.path_of(engines.choose(target=target, precision=precision))
    if path.is_symlink():
        from tapeout.runtime.store.cache import touch_cached

        touch_cached(path)
    yield path


@contextmanager
def _fetched(
    url: str, target: str | None, precision: str | None, progress: Callable[[str], None] | None
) -> Iterator[Path]:
    from tapeout.runtime.store.cache import Cache
    from tapeout.runtime.store.options import cache_limit, cache_root
    from tapeout.runtime.store.pull import Wanted, pulled_into_cache
    from tapeout.runtime.store.transfer import silent

    wanted = Wanted(target, precision, one=True)
    cache = Cache(cache_root(), cache_limit())
    logger.info("%s: its engine for this machine is fetched unless it is in %s", shown_url(url), cache.root)
    with pulled_into_cache(parse_address(url), cache, wanted, progress or silent) as pulled:
        yield pulled.paths[0]


def weight_owners(
    engine: str | os.PathLike[str], *, target: str | None = None, precision: str | None = None
) -> list[Path]:
    """Engine files that between them name every weight file to write: the file itself, or one engine of
    a set for each file that the engines left by `target` and `precision` share.

    Raises:
        UsageError: as `resolved_engine`, or none of these engines shares its weights.
    """
    path = Path(engine)
    if not _is_directory(path):
        _check_no_choice(path, target, precision)
        return [path]
    engines = open_engine_set(path)
    left = asked_for(engines.engines, str(path), target, precision)
    owners = {name: entry for entry in reversed(left) for name in entry.weights}
    if not owners:
        raise UsageError(
            f"all of these engines embed their weights, there is no file to write:\n{listing(left)}",
            hint="build engines with --weights shared, as `tapeout build --matrix` does",
        )
    return sorted({engines.path_of(entry) for entry in owners.values()})


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long a name, a zero byte: whoever opens it tells
        return False


def _check_no_choice(path: Path, target: str | None, precision: str | None) -> None:
    given = [f"--{name} {value}" for name, value in (("target", target), ("precision", precision)) if value]
    if given:
        raise UsageError(
            f"{' and '.join(given)}: expected with an engine set, but {path} is one engine",
            hint="leave it out, or name the directory of an engine set",
        )
