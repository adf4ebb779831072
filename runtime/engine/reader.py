"""Opening engines: a file and, where it has one, the shared weight file beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tapeout.plugins.errors import EngineCorruptError, EngineError, EngineIncompatibleError, UsageError
from tapeout.runtime.engine.container import KIND_ENGINE, KIND_WEIGHTS, REBUILD
from tapeout.runtime.engine.launches import KERNEL_ABI, LaunchTable
from tapeout.runtime.engine.manifest import FORMAT_VERSION, Manifest
from tapeout.runtime.engine.mapped_file import WRONG_FILE, MappedFile, other_version
from tapeout.runtime.engine.program import Program

logger = logging.getLogger("tapeout")


@dataclass(frozen=True)
class TensorInfo:
    """A weight of the engine. `begin` is its offset in the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


@dataclass(frozen=True)
class WeightData:
    """A weight's bytes: a read-only view of the mapped file, valid until the engine is closed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Engine:
    """An open engine. Use `open_engine`; close it, or use it as a context manager."""

    def __init__(
        self,
        file: MappedFile,
        weights_file: MappedFile | None,
        manifest: Manifest,
        program: Program,
        launches: LaunchTable | None = None,
    ) -> None:
        self.path = file.path
        self.manifest = manifest
        self.program = program
        self.launches = launches  # of cuda engines
        self._file = file
        self._weights = weights_file or file
        self.weights: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, e.dtype, e.shape, e.begin, e.size_bytes)
            for e in self._weights.layout.section("weights")
            for name in (e.name.removeprefix("weights/"),)
        }

    @property
    def digest(self) -> str:
        """Identifies the engine's contents (SHA-256 over all its checksums, hex)."""
        return self._file.verifier.seal.hex()

    @property
    def weights_digest(self) -> str:
        """Identifies the weights that run, and all else in the engine: its digest, and the shared weight
        file's where it has one."""
        return (
            self.digest
            if self._weights is self._file
            else f"{self.digest}+{self._weights.verifier.seal.hex()}"
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The engine file, then the shared weight file if there is one."""
        return (self.path,) if self._weights is self._file else (self.path, self._weights.path)

    @property
    def dummy_seed(self) -> str | None:
        """Seed of the random weights that stand in for the model's; None when it has the model's own."""
        return self._weights.metadata.get("dummy")

    @property
    def shared_weights_path(self) -> Path | None:
        """Where the shared weight file stands, or has to; None when the engine embeds its weights."""
        if self.manifest.weights.get("storage") != "shared":
            return None
        return _shared_path(self.path, self.manifest)

    @property
    def shared_seal(self) -> bytes:
        """Seal of the shared weight file this engine was built with (SHA-256 over its checksums)."""
        return self._file.verifier.shared_seal

    @property
    def text_names(self) -> tuple[str, ...]:
        return self._names("text")

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return self._names("kernels")

    @property
    def segment_names(self) -> tuple[str, ...]:
        return self._names("segments")

    def weight(self, name: str) -> WeightData:
        """A weight's bytes, not copied. KeyError when there is none of that name."""
        info = self.weights[name]
        return WeightData(
            name,
            info.dtype,
            info.shape,
            self._weights.bytes_of(self._weights.layout.entries[f"weights/{name}"]),
        )

    def release_weight(self, name: str) -> None:
        """Let the system take the weight's memory back; it is read again from the file when used."""
        info = self.weights[name]
        self._weights.advise(mmap.MADV_DONTNEED, info.begin, info.begin + info.size_bytes)

    def text(self, name: str) -> bytes:
        """A text such as `tokenizer.json`. KeyError when there is none of that name."""
        return bytes(self._file.bytes_of(self._file.layout.entries[f"text/{name}"]))

    def kernel(self, name: str) -> bytes:
        """A compiled kernel library. KeyError when there is none of that name."""
        return bytes(self._file.bytes_of(self._file.layout.entries[f"kernels/{name}"]))

    def segment(self, name: str) -> bytes:
        """A serialized TensorRT engine. KeyError when there is none of that name."""
        return bytes(self._file.bytes_of(self._file.layout.entries[f"segments/{name}"]))

    def sizes(self) -> dict[str, int]:
        """Bytes by section, `shared_weights` (the sibling file, 0 when embedded) and `total`."""
        shared = 0 if self._weights is self._file else self._weights.file_bytes
        return {
            **self._file.layout.sizes(),
            "shared_weights": shared,
            "total": self._file.file_bytes + shared,
        }

    def verify(self, *, weights: bool = True) -> None:
        """Kernels, texts and weights against their checksums; reads the whole file once.

        `weights=False` is for who checks weights while copying them (`read_weights`).
        """
        self._file.verifier.check_blobs()
        if weights:
            self._weights.verifier.check_weights()

    @property
    def weights_begin(self) -> int:
        """Where the region of all weights starts in the file that holds it."""
        return self._weights.layout.weight_region[0]

    @property
    def weights_bytes(self) -> int:
        """Size of the region of all weights, with the padding between them."""
        begin, end = self._weights.layout.weight_region
        return end - begin

    def read_weights(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the weight region from `offset` on, and compare checksums; any thread may call.

        Both are multiples of CHUNK_BYTES, but for the region's end. Raises EngineCorruptError.
        """
        self._weights.read_into(self.weights_begin + offset, into)
        self._weights.verifier.check_weight_bytes(offset, into)

    def verify_all(self) -> None:
        """Read every byte again and compare all checksums, SHA-256 of the weights included."""
        for file in {id(f): f for f in (self._file, self._weights)}.values():
            file.verifier.check_header()
            file.verifier.check_blobs()
            file.verifier.check_weights(full=True)

    def close(self) -> None:
        self._file.close()
        self._weights.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _names(self, section: str) -> tuple[str, ...]:
        return tuple(e.name.removeprefix(section + "/") for e in self._file.layout.section(section))


def open_engine(path: str | Path, *, verify: bool = True, weights: bool = True) -> Engine:
    """Open an engine file; `weights=False` leaves a shared weight file alone.

    Header, manifest and program are always checked; `verify` adds kernels, texts and weights
    (reads the whole file once). Raises UsageError when there is no such file, EngineCorruptError
    when it is no engine or damaged, EngineIncompatibleError when its format is another version's,
    EngineError when its shared weight file is missing or another one.
    """
    path = Path(path)
    _check_path(path)
    with contextlib.ExitStack() as stack:
        file = _open_file(path, KIND_ENGINE)
        stack.callback(file.close)
        manifest = Manifest.from_json(_json(file, "manifest"))
        program = Program.from_json(_json(file, "program"))
        launches = _launches(file)
        if manifest.format_version != FORMAT_VERSION:
            raise other_version(str(path), str(manifest.format_version))
        weights_file = None
        if weights and manifest.weights.get("storage") == "shared":
            weights_file = _open_shared(path, manifest, file.verifier.shared_seal)
            stack.callback(weights_file.close)
        engine = Engine(file, weights_file, manifest, program, launches)
        if verify:
            engine.verify()
        stack.pop_all()
        return engine


def open_weights_file(path: Path) -> MappedFile:
    """Open a shared weight file by itself (header checked, weights not yet)."""
    _check_path(path)
    return _open_file(path, KIND_WEIGHTS)


def _check_path(path: Path) -> None:
    hint = WRONG_FILE
    try:
        directory, file, exists = path.is_dir(), path.is_file(), path.exists()
    except OSError as error:  # a name that is too long, a directory that may not be searched
        raise UsageError(f"engine {path} cannot be read: {error.strerror}", hint=hint) from None
    if directory:
        raise UsageError(f"{path} is a directory, expected an engine file", hint=hint)
    if not file:
        raise UsageError(f"{path} is not a file" if exists else f"engine {path} does not exist", hint=hint)


def _open_file(path: Path, kind: str) -> MappedFile:
    try:
        return MappedFile(path, kind)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=WRONG_FILE) from None


def _shared_path(path: Path, manifest: Manifest) -> Path:
    name = manifest.weights.get("file")
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise EngineCorruptError(f"{path}: the manifest names no shared weight file: {name!r}", hint=REBUILD)
    return path.parent / name


def _open_shared(path: Path, manifest: Manifest, seal: bytes) -> MappedFile:
    shared, digest = _shared_path(path, manifest), manifest.weights.get("digest")
    name = shared.name
    if not shared.is_file():
        raise EngineError(
            f"{path} keeps its weights in {name}, which does not stand beside it",
            hint=f"copy it there, or make it from the model: tapeout weights {path.name} MODEL",
        )
    file = _open_file(shared, KIND_WEIGHTS)
    if file.metadata.get("digest") == digest and "dummy" in file.metadata:
        seed = file.metadata["dummy"]
        logger.warning("%s holds random weights (seed %s): the output means nothing", name, seed)
        return file
    if file.metadata.get("digest") != digest or file.verifier.seal != seal:
        file.close()
        raise EngineIncompatibleError(
            f"{shared} does not hold the weights of {path}: it has digest {file.metadata.get('digest')} "
            f"(seal {file.verifier.seal.hex()[:16]}), expected {digest} (seal {seal.hex()[:16]})",
            hint="copy the weight file that was built together with this engine, or build again",
        )
    return file


def _launches(file: MappedFile) -> LaunchTable | None:
    """The launches of a cuda engine, if this runtime can replay them."""
    if "launches" not in file.metadata:
        return None
    abi = file.metadata.get("kernel_abi", "none")
    if abi != str(KERNEL_ABI):  # before the table is looked at, which another version may write otherwise
        raise EngineIncompatibleError(
            f"{file.path} has kernels for kernel ABI {abi}, this tapeout's is {KERNEL_ABI}",
            hint=f"rebuild it with this version: tapeout build MODEL -o {file.path.name}",
        )
    return LaunchTable.from_json(_json(file, "launches"))


def _json(file: MappedFile, key: str) -> Any:
    try:
        return json.loads(file.metadata[key])
    except (KeyError, ValueError, RecursionError) as error:
        raise EngineCorruptError(f"{file.path}: the {key} cannot be read: {error!r}", hint=REBUILD) from None
