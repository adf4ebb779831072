"""A directory as an engine set: by its index, or by the engines that lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tapeout.plugins.errors import EngineCorruptError, EngineError, TapeoutError, UsageError
from tapeout.runtime.engine.reader import open_engine
from tapeout.runtime.engine_set.choose import choose_engine, has_gpu_engines
from tapeout.runtime.engine_set.entries import entry_of
from tapeout.runtime.engine_set.index import INDEX_NAME, EngineEntry, EngineSetIndex, load_index
from tapeout.runtime.engine_set.index_check import ENGINE_SUFFIX
from tapeout.runtime.engine_set.machine import Machine, this_machine

_SHOWN = 8


@dataclass(frozen=True)
class EngineSet:
    """The engines of one model in a directory.

    `index` is None where there is no index.json: then `engines` come from the headers of the
    directory's engine files, their `sha256` is empty, and content keys are digests.
    """

    directory: Path
    source: str
    engines: tuple[EngineEntry, ...]
    index: EngineSetIndex | None

    def choose(
        self, *, target: str | None = None, precision: str | None = None, machine: Machine | None = None
    ) -> EngineEntry:
        """The engine for this machine, or the one asked for: see `choose_engine` for rules and errors."""
        if machine is None and (target is None or ":" not in target):
            machine = this_machine(look_for_gpu=target != "cpu" and has_gpu_engines(self.engines))
        return choose_engine(self.engines, machine, str(self.directory), target=target, precision=precision)

    def path_of(self, entry: EngineEntry) -> Path:
        """Where an engine of the set lies.

        Raises EngineCorruptError when it is not there, or is another file than the index says: engines
        check themselves when they are opened, but one of another build would pass.
        """
        path = self.directory / entry.file
        found = path.stat().st_size if path.is_file() else None
        if found != entry.size_bytes:
            what = "is not there" if found is None else f"has {found:,} bytes"
            raise EngineCorruptError(
                f"{path} {what}, {INDEX_NAME} lists it with {entry.size_bytes:,} bytes",
                hint="fetch the set again (tapeout pull), or build it again (tapeout build --matrix)",
            )
        return path


def open_engine_set(directory: Path) -> EngineSet:
    """The engine set in a directory.

    Without an index the directory's engine files are the set, if all of them can be read and are of one
    model: to choose by machine among engines of several models would be to choose a model by chance.

    Raises:
        UsageError: it is no directory, holds neither, or engines of several models.
        EngineError: the index is unsound or another version's, or an engine file cannot be read.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "is not there"
        raise UsageError(
            f"{directory} {what}, expected the directory of an engine set",
            hint="`tapeout build --matrix` and `tapeout pull` write engine sets",
        )
    if (directory / INDEX_NAME).exists():
        index = load_index(directory)
        return EngineSet(directory, index.source, index.engines, index)
    try:
        files = sorted(p for p in directory.glob(f"*{ENGINE_SUFFIX}") if not p.name.startswith("."))
        if not files:
            raise _no_set(directory)
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror or error}") from None
    return _from_headers(directory, files)


def _from_headers(directory: Path, files: list[Path]) -> EngineSet:
    entries: list[EngineEntry] = []
    sources: dict[str, list[str]] = {}
    problems: list[TapeoutError] = []
    for path in files:
        try:
            with open_engine(path, verify=False, weights=False) as engine:
                shared = engine.shared_weights_path
                names = () if shared is None else (shared.name,)
                entries.append(entry_of(engine, "", engine.digest, names))
                sources.setdefault(engine.manifest.model.checkpoint, []).append(path.name)
        except TapeoutError as error:
            problems.append(error)
    if problems:
        raise EngineError(
            f"{directory} has no {INDEX_NAME}, and not all of its engines can be read:\n"
            + "\n".join(f"  {error.message}" for error in problems),
            hint="name the engine's file, or remove those that cannot be read",
        )
    if len(sources) > 1:
        lines = [f"  {', '.join(names)}: {source}" for source, names in sources.items()]
        raise UsageError(
            f"{directory} has no {INDEX_NAME} and holds engines of {len(sources)} models:\n"
            + "\n".join(lines),
            hint="name the engine's file, or give each model a directory of its own",
        )
    return EngineSet(directory, next(iter(sources)), tuple(entries), None)


def _no_set(directory: Path) -> UsageError:
    sets = sorted(path.parent.name for path in directory.glob(f"*/{INDEX_NAME}"))
    hint = "pass the file that `tapeout build -o FILE` wrote, or the directory of an engine set"
    if sets:
        more = f" and {len(sets) - _SHOWN} more" if len(sets) > _SHOWN else ""
        hint = f"it holds engine sets: name one, {directory / sets[0]} ({', '.join(sets[:_SHOWN])}{more})"
    return UsageError(
        f"{directory} is a directory, expected an engine file or an engine set: it has no {INDEX_NAME} "
        f"and no {ENGINE_SUFFIX} file",
        hint=hint,
    )
