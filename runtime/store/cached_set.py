"""A set in the cache: a directory of links to blobs, and an index of what is there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine_set.index import INDEX_NAME, EngineEntry, EngineSetIndex, load_index, save_index


def reduced(index: EngineSetIndex, kept: Collection[str]) -> EngineSetIndex:
    """The index with the engines whose files are named, and the weights that they need."""
    engines = tuple(entry for entry in index.engines if entry.file in kept)
    names = {name for entry in engines for name in entry.weights}
    return replace(index, engines=engines, weights=tuple(w for w in index.weights if w.file in names))


def link_set(folder: Path, blobs: Path, index: EngineSetIndex, entries: Collection[EngineEntry]) -> None:
    """Make `folder` hold these engines of the set beside those that it holds already.

    The caller has a lease on their blobs, and is alone in changing links.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {entry.file for entry in _present(folder)}
    smaller = reduced(index, there | {entry.file for entry in entries})
    for name, (_, sha256) in smaller.files().items():
        _link(folder / name, blobs / sha256)
    save_index(smaller, folder)


def unlink_removed(folder: Path) -> None:
    """Take engines out of a set some of whose blobs are gone; a set without engines goes altogether."""
    links = [path for path in folder.iterdir() if path.is_symlink()]
    if all(path.exists() for path in links):
        return
    whole = {entry.file for entry in _present(folder)}
    if not whole:
        shutil.rmtree(folder, ignore_errors=True)
        return
    smaller = reduced(load_index(folder), whole)
    save_index(smaller, folder)
    for path in links:
        if path.name not in smaller.files():
            path.unlink(missing_ok=True)


def _present(folder: Path) -> list[EngineEntry]:
    """Engines of the folder's index that are there with their weights; none without a sound index."""
    if not (folder / INDEX_NAME).exists():
        return []
    try:
        index = load_index(folder)
    except TapeoutError:
        return []
    return [
        entry
        for entry in index.engines
        if all((folder / name).exists() for name in (entry.file, *entry.weights))
    ]


def _link(path: Path, blob: Path) -> None:
    """A link to a blob, relative so that the cache can be moved; an old one is replaced."""
    goal = os.path.relpath(blob, path.parent)
    with contextlib.suppress(OSError):
        if path.readlink() == Path(goal):
            return
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    temporary.symlink_to(goal)
    temporary.replace(path)
