"""Writing engine files: laid out first, weights streamed one recipe at a time, all or nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tapeout.compiler.files import check_output, remove_leftovers, temporary_file, uninterrupted
from tapeout.compiler.pending_file import NO_SEAL, PendingFile, Progress
from tapeout.compiler.shared_weights import SharedWeights
from tapeout.model_defs.weights import Read, WeightRef, recipe_digest
from tapeout.plugins.errors import TapeoutError
from tapeout.runtime.engine.container import KIND_ENGINE, Layout, plan_layout
from tapeout.runtime.engine.launches import KERNEL_ABI, LaunchTable
from tapeout.runtime.engine.manifest import Manifest
from tapeout.runtime.engine.program import Program
from tapeout.runtime.engine.program_check import ProgramWeight, program_problems

_HEADER_RESERVE_BYTES = 2048  # room for the verdict of the comparison with Hugging Face


@dataclass(frozen=True)
class WriteResult:
    """Files that now exist (the engine first), bytes by section, and whether a shared weight
    file was already there and was kept."""

    paths: tuple[Path, ...]
    sizes: Mapping[str, int]
    shared_reused: bool = False

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of each file by its name."""
        shared = self.sizes["shared_weights"]
        sizes = (self.sizes["total"] - shared, shared)
        return {path.name: size for path, size in zip(self.paths, sizes, strict=False)}


def write_engine(
    path: str | Path,
    manifest: Manifest,
    program: Program,
    weights: Mapping[str, WeightRef],
    read: Read,
    kernels: Mapping[str, bytes],
    texts: Mapping[str, bytes],
    *,
    source_digest: str,
    shared: bool = False,
    progress: Progress | None = None,
) -> WriteResult:
    """Write an engine in one go: `stage_engine` and `commit`."""
    file = SharedWeights(Path(path), weights, read, lambda: source_digest) if shared else None
    with stage_engine(
        path,
        manifest,
        program,
        weights,
        read,
        kernels,
        texts,
        source_digest=source_digest,
        shared=file,
        progress=progress,
    ) as staged:
        return staged.commit(manifest)


def stage_engine(
    path: str | Path,
    manifest: Manifest,
    program: Program,
    weights: Mapping[str, WeightRef],
    read: Read,
    kernels: Mapping[str, bytes],
    texts: Mapping[str, bytes],
    *,
    source_digest: str,
    shared: SharedWeights | None = None,
    launches: LaunchTable | None = None,
    segments: Mapping[str, bytes] = MappingProxyType({}),
    progress: Progress | None = None,
    weight_facts: Mapping[str, Any] | None = None,
) -> StagedEngine:
    """Write an engine under a temporary name; with `shared`, made of the same weights, after their file.

    `read` returns a checkpoint tensor or `const:<name>`; `source_digest` is the checkpoint's own
    digest; `launches` and `segments` belong to cuda engines. `manifest.weights` is filled in here, with
    `weight_facts` beside what is known here. What is staged can be opened like any engine; `commit` gives it
    its name. Same arguments, same bytes.
    Peak memory: one recipe's result plus its largest source.

    Raises UsageError for an unusable path, TapeoutError when the program is unsound, a recipe
    fails or the disk is full.
    """
    path = check_output(path)
    _check_program(program, manifest, weights)
    specs = {name: (ref.dtype, ref.shape) for name, ref in weights.items()}
    facts: dict[str, Any]
    if shared is None:
        digest, sibling = recipe_digest(weights, source_digest, read), None
        facts, seal, shared_bytes = {"storage": "embedded", "digest": digest}, NO_SEAL, 0
    else:
        sibling = shared.result(progress)
        facts = {"storage": "shared", "digest": sibling.digest, "file": sibling.path.name}
        seal, shared_bytes = sibling.seal, sibling.file_bytes
    sections = {"kernels": kernels, "segments": segments, "text": texts}
    blobs = {f"{section}/{n}": b for section, named in sections.items() for n, b in named.items()}
    embedded = weights if sibling is None else {}

    def lay_out(manifest: Manifest, header_bytes: int = 0) -> Layout:
        manifest = replace(manifest, weights={**facts, **(weight_facts or {})})
        metadata = {"manifest": _dump(manifest.to_json()), "program": _dump(program.to_json())}
        if launches is not None:
            metadata |= {"kernel_abi": str(KERNEL_ABI), "launches": _dump(launches.to_json())}
        sizes = {name: len(blob) for name, blob in blobs.items()}
        return plan_layout(KIND_ENGINE, metadata, {n: specs[n] for n in embedded}, sizes, header_bytes)

    # The header stands in front of the weights, but a verdict on the written engine belongs into it.
    layout = lay_out(manifest, len(lay_out(manifest).header) + _HEADER_RESERVE_BYTES)
    file = PendingFile(path, layout, blobs, seal)
    with file.failing_cleanly():
        file.write_sections(embedded, read, progress)
        file.write_integrity()
        sizes = {**layout.sizes(), "shared_weights": shared_bytes, "total": layout.file_bytes + shared_bytes}
        paths = (path,) if sibling is None else (path, sibling.path)
        result = WriteResult(paths, sizes, sibling is not None and sibling.reused)
        return StagedEngine(file, lay_out, result)


class StagedEngine:
    """A complete engine under a temporary name. As a context manager it is dropped on the way
    out unless it was committed; a shared weight file stays."""

    def __init__(
        self, file: PendingFile, lay_out: Callable[[Manifest, int], Layout], result: WriteResult
    ) -> None:
        self._file, self._lay_out = file, lay_out
        self.result = result  # what will be there after `commit`

    @property
    def path(self) -> Path:
        """Where the engine lies for now; `open_engine` takes it."""
        return self._file.temporary

    def commit(self, manifest: Manifest, report: tuple[Path, str] | None = None) -> WriteResult:
        """Seal the engine with the final manifest and rename it to its path.

        `report` is a path and a text that appear together with the engine: when it cannot be
        written there is no engine, and no signal comes between the two.
        """
        with self._file.failing_cleanly():
            self._file.replace_header(self._lay_out(manifest, len(self._file.layout.header)))
            self._file.write_integrity()
        with contextlib.ExitStack() as stack:
            pending = stack.enter_context(_pending_text(*report)) if report else None
            with self._file.failing_cleanly(), uninterrupted():
                if pending is not None:
                    pending[0].replace(pending[1])
                self._file.rename()
        return self.result

    def __enter__(self) -> StagedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextlib.contextmanager
def _pending_text(path: Path, text: str) -> Iterator[tuple[Path, Path]]:
    """A small file under a temporary name, and the name it is to get."""
    target = check_output(path, "report")
    remove_leftovers(target)
    with contextlib.ExitStack() as stack:
        try:
            temporary, file = stack.enter_context(temporary_file(target))
            file.write(text.encode())
            file.flush()
        except OSError as error:
            raise TapeoutError(f"{path} could not be written: {error.strerror or error}") from error
        yield temporary, target


def _dump(data: Any) -> str:
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise TapeoutError(f"the manifest or program holds a value JSON has no form for: {error}") from None


def _check_program(program: Program, manifest: Manifest, weights: Mapping[str, WeightRef]) -> None:
    known = {name: ProgramWeight(ref.dtype, ref.shape) for name, ref in weights.items()}
    problems = program_problems(program, manifest.limits, known)
    if problems:
        raise TapeoutError(
            "the program is unsound and is not written:\n" + "\n".join(f"  {p}" for p in problems[:20]),
            hint="this is a fault of the compiler; please report it with --dump DIR",
        )
