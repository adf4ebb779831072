"""`tapeout refit DIR`: another checkpoint's weights in all engines of a set."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tapeout.compiler.files import check_directory
from tapeout.compiler.pending_file import Progress
from tapeout.compiler.refit import Refitted, refit
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine_set import EngineEntry, EngineSetIndex, WeightsEntry, save_index
from tapeout.runtime.engine_set.directory import open_engine_set
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

    Weights that engines share are made once. The index is written when all engines are there; the set's
    model has the directory's name. Arguments and errors are `refit`'s.
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
    output.mkdir(parents=True, exist_ok=True)
    done: dict[str, Refitted] = {}
    entries: list[EngineEntry] = []
    weights: dict[str, WeightsEntry] = {}
    for entry in engines.engines:
        done[entry.file] = refit(
            engines.path_of(entry),
            model,
            output / entry.file,
            revision=revision,
            keep_text=keep_text,
            progress=progress,
        )
        known = {output / shared.file: shared.sha256 for shared in weights.values()}
        described, shared_files = describe_engine(output / entry.file, hashes=known)
        entries.append(described)
        weights |= {shared.file: shared for shared in shared_files}
    source = next(iter(done.values())).checkpoint
    versions = {"tapeout": version("tapeout")}
    index = EngineSetIndex.of(name, source, tuple(entries), tuple(weights.values()), versions)
    save_index(index, output)
    return RefittedSet(output, done)
