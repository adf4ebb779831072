"""`tapeout refit DIR`: another checkpoint's weights in all engines of a set."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tapeout.compiler.files import check_directory
from tapeout.compiler.pending_file import Progress
from tapeout.compiler.refit import Refitted, refit
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine_set import EngineEntry, EngineSetIndex, WeightsEntry, save_index
from tapeout.runtime.engine_set.directory import EngineSet, open_engine_set
from tapeout.runtime.engine_set.entries import describe_engine
from tapeout.runtime.engine_set.index_check import MODEL_NAME


@dataclass(frozen=True)
class RefittedSet:
    """The directory that now is a set, and what became of each engine, by file name."""

    directory: Path
    engines: dict[str, Refitted]


def refit_set(
    directory: Path,
    model: str,
    output: Path,
    *,
    revision: str | None = None,
    keep_text: bool = False,
    progress: Progress | None = None,
) -> RefittedSet:
    """Refit every engine of the set in `directory` into `output`, a new or empty directory.

    Weights that engines share are made once. The directory appears when all engines are there, with their
    index; the set's model has its name. Arguments and errors are `refit`'s.
    """
    engines = open_engine_set(directory)
    name = output.resolve().name
    if not MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"--output: {name!r} is no name for a set, expected letters, digits and . _ + -",
            hint="the set's model gets the name of its directory",
        )
    check_directory(output, "output")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(f"--output: {str(output)!r} is not empty", hint="name a new directory for the set")
    place = output.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with _staged(place) as staging:
        done = _refit_all(engines, model, staging, name, revision, keep_text, progress)
        staging.rename(place)  # over an empty directory too; a set is whole or not there
    return RefittedSet(output, {file: _moved(one, staging, output) for file, one in done.items()})


def _refit_all(
    engines: EngineSet,
    model: str,
    staging: Path,
    name: str,
    revision: str | None,
    keep_text: bool,
    progress: Progress | None,
) -> dict[str, Refitted]:
    """Engines, weights and index of the new set, in `staging`."""
    done: dict[str, Refitted] = {}
    entries: list[EngineEntry] = []
    weights: dict[str, WeightsEntry] = {}
    for entry in engines.engines:
        path = staging / entry.file
        done[entry.file] = refit(
            engines.path_of(entry), model, path, revision=revision, keep_text=keep_text, progress=progress
        )
        known = {staging / shared.file: shared.sha256 for shared in weights.values()}
        described, shared_files = describe_engine(path, hashes=known)
        entries.append(described)
        weights |= {shared.file: shared for shared in shared_files}
    source = next(iter(done.values())).checkpoint
    versions = {"tapeout": version("tapeout")}
    index = EngineSetIndex.of(name, source, tuple(entries), tuple(weights.values()), versions)
    save_index(index, staging)
    return done


@contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """A hidden directory beside `output`; what is still in it at the end is removed."""
    staging = output.parent / f".{output.name}.{secrets.token_hex(4)}.partial"
    staging.mkdir()
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _moved(refitted: Refitted, staging: Path, output: Path) -> Refitted:
    files = tuple(output / path.name for path in refitted.files)
    text = refitted.ran.text.replace(str(staging), str(output))
    return replace(refitted, files=files, ran=replace(refitted.ran, text=text))
