"""The weight file that engines of one model share: named by the digest of what it holds, written once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.files import check_output, remove_leftovers
from tapeout.compiler.pending_file import NO_SEAL, PendingFile, Progress
from tapeout.model_defs.tensor_hashes import TensorHashes
from tapeout.model_defs.weights import Read, WeightRef, recipe_digest
from tapeout.plugins.errors import EngineError, UsageError
from tapeout.runtime.engine.container import KIND_WEIGHTS, Layout, plan_layout
from tapeout.runtime.engine.reader import open_weights_file

_SUFFIX = ".weights.safetensors"
_POLL_SECONDS = 0.1  # how often a listener hears of a file that another thread writes


@dataclass(frozen=True)
class SharedFile:
    """The file beside an engine; `reused` when it was there already, whole."""

    path: Path
    digest: str
    seal: bytes
    file_bytes: int
    reused: bool


class SharedWeights:
    """The weight file beside an engine: written when asked for, or from the beginning of `ahead`.

    It gets its name as soon as it is complete, and keeps it whatever becomes of the engine: another build
    may have begun to use it.
    """

    def __init__(
        self,
        engine: Path,
        weights: Mapping[str, WeightRef],
        read: Read,
        source_digest: Callable[[], str],
        hashes: TensorHashes | None = None,
    ) -> None:
        """`read` returns a checkpoint tensor or `const:<name>`; `source_digest` the checkpoint's own digest,
        made of `hashes`: while the file is written, if no other file can be it.

        Raises UsageError when a file beside `engine` would not be found by it.
        """
        target = check_output(engine)
        if target.parent.resolve() != engine.parent.resolve():
            raise UsageError(
                f"output {engine} is a link into {target.parent}: "
                "its weights would stand there and not be found",
                hint=f"name the file itself: -o {target}",
            )
        self._engine, self._weights, self._read = target, weights, read
        self._source_digest, self._hashes = source_digest, hashes
        self._given_up, self._done = threading.Event(), (0, 1)
        self._begun: Future[SharedFile] | None = None
        self._file: SharedFile | None = None

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Write beside what runs within; a file that is not complete at its end is given up and gone."""
        with ThreadPoolExecutor(1, "tapeout-weights") as writer:
            self._begun = writer.submit(self._written, self._heard)
            try:
                yield
            finally:
                self._given_up.set()

    def result(self, progress: Progress | None = None) -> SharedFile:
        """The file, complete.

        Raises UsageError for an unusable path, TapeoutError when a recipe fails or the disk is full.
        """
        if self._begun is None:
            self._file = self._file or self._written(progress)
            return self._file
        while progress is not None and not wait([self._begun], _POLL_SECONDS).done:
            progress(*self._done)
        return self._begun.result()

    def _heard(self, done: int, total: int) -> None:
        if self._given_up.is_set():
            raise _GivenUp
        self._done = done, total

    def _written(self, progress: Progress | None) -> SharedFile:
        remove_leftovers(self._engine.with_name(f"*{_SUFFIX}"))
        if self._hashes is not None and self._hashes.see_reads and not others_beside(self._engine):
            return self._named_afterwards(self._hashes, progress)
        digest, path = self._name()
        if (found := existing_seal(path, digest, self._weights)) is not None:
            return self._file_of(path, digest, found, reused=True)
        seal = write_weights_file(path, {"digest": digest}, self._weights, self._read, progress)
        return self._file_of(path, digest, seal)

    def _named_afterwards(self, hashes: TensorHashes, progress: Progress | None) -> SharedFile:
        """Reading the checkpoint once instead of twice: its bytes are hashed as they are written."""
        unknown = _layout({"digest": "0" * 64}, self._weights)
        file = PendingFile(self._engine.with_name(f"{self._engine.name}{_SUFFIX}"), unknown, {}, NO_SEAL)
        with file.failing_cleanly():
            with hashes.while_reading():
                file.write_sections(self._weights, self._read, progress)
            digest, path = self._name()
            file.replace_header(_layout({"digest": digest}, self._weights))
            seal = file.write_integrity()
            file.rename(path)
        return self._file_of(path, digest, seal)

    def _name(self) -> tuple[str, Path]:
        digest = recipe_digest(self._weights, self._source_digest(), self._read)
        return digest, check_output(self._engine.with_name(f"{digest[:16]}{_SUFFIX}"), "weight file")

    def _file_of(self, path: Path, digest: str, seal: bytes, *, reused: bool = False) -> SharedFile:
        return SharedFile(path, digest, seal, _layout({"digest": digest}, self._weights).file_bytes, reused)


def others_beside(engine: Path) -> bool:
    """Whether weight files lie beside an engine, one of which may hold its weights."""
    return any(engine.parent.glob(f"*{_SUFFIX}"))


class _GivenUp(Exception):
    """Nobody waits for the file any more."""


def existing_seal(path: Path, digest: str, weights: Mapping[str, WeightRef]) -> bytes | None:
    """Seal of a shared weight file that is already there and whole; None when it must be written."""
    if not path.is_file():
        return None
    try:
        file = open_weights_file(path)
    except EngineError:
        return None
    try:
        header = _layout({"digest": digest}, weights).header
        if file.metadata.get("digest") != digest or file.layout.header != header:
            return None
        file.verifier.check_weights(full=True)
        return file.verifier.seal
    except EngineError:
        return None
    finally:
        file.close()


def write_weights_file(
    path: Path,
    metadata: Mapping[str, str],
    weights: Mapping[str, WeightRef],
    read: Read,
    progress: Progress | None = None,
    *,
    seal: bytes | None = None,
) -> bytes:
    """Write a weight file by itself; returns its seal.

    With `seal` given, a file that comes out with another one gets no name: what was at `path` stays.
    """
    file = PendingFile(path, _layout(metadata, weights), {}, NO_SEAL)
    with file.failing_cleanly():
        file.write_sections(weights, read, progress)
        found = file.write_integrity()
        if seal in (None, found):
            file.rename()
        else:
            file.close()
    return found


def _layout(metadata: Mapping[str, str], weights: Mapping[str, WeightRef]) -> Layout:
    specs = {name: (ref.dtype, ref.shape) for name, ref in weights.items()}
    return plan_layout(KIND_WEIGHTS, metadata, specs, {})
