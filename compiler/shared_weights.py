"""The weight file that engines of one model share: named by the digest of what it holds, written once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.files import check_output, remove_leftovers
from tapeout.compiler.pending_file import PendingFile, Progress
from tapeout.model_defs.weights import Read, WeightRef, recipe_digest
from tapeout.plugins.errors import EngineError, UsageError
from tapeout.runtime.engine.container import KIND_WEIGHTS, SHA_BYTES, Layout, plan_layout
from tapeout.runtime.engine.reader import open_weights_file

_NO_SEAL = bytes(SHA_BYTES)
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
        self, engine: Path, weights: Mapping[str, WeightRef], read: Read, source_digest: Callable[[], str]
    ) -> None:
        """`read` returns a checkpoint tensor or `const:<name>`; `source_digest` the checkpoint's own digest.

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
        self._source_digest = source_digest
        self._given_up, self._done = threading.Event(), (0, 1)
        self._file: Future[SharedFile] | None = None

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Write beside what runs within; a file that is not complete at its end is given up and gone."""
        with ThreadPoolExecutor(1, "tapeout-weights") as writer:
            self._file = writer.submit(self._write, self._heard)
            try:
                yield
            finally:
                self._given_up.set()

    def result(self, progress: Progress | None = None) -> SharedFile:
        """The file, complete.

        Raises UsageError for an unusable path, TapeoutError when a recipe fails or the disk is full.
        """
        if self._file is None:
            return self._write(progress)
        while progress is not None and not wait([self._file], _POLL_SECONDS).done:
            progress(*self._done)
        return self._file.result()

    def _heard(self, done: int, total: int) -> None:
        if self._given_up.is_set():
            raise _GivenUp
        self._done = done, total

    def _write(self, progress: Progress | None) -> SharedFile:
        digest = recipe_digest(self._weights, self._source_digest(), self._read)
        remove_leftovers(self._engine.with_name("*.weights.safetensors"))
        path = check_output(self._engine.with_name(f"{digest[:16]}.weights.safetensors"), "weight file")
        file_bytes = _layout({"digest": digest}, self._weights).file_bytes
        if (found := existing_seal(path, digest, self._weights)) is not None:
            return SharedFile(path, digest, found, file_bytes, reused=True)
        seal = write_weights_file(path, {"digest": digest}, self._weights, self._read, progress)
        return SharedFile(path, digest, seal, file_bytes, reused=False)


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
    file = PendingFile(path, _layout(metadata, weights), {}, _NO_SEAL)
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
