"""Segments that were built before, in a folder beside the timing cache.

TensorRT's builder numbers the parts of an engine in an order that differs from run to run: two builds of one
region have the same layers and the same size, and not always the same bytes. What was built once is kept, so
that the same inputs and caches give the same engine, as for times (DESIGN.md decision 13); and it saves time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.tensorrt.builder import SETTINGS_VERSION, Built
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.codec import encode
from tapeout.runtime.engine.launches import SegmentProfile


def kept_folder(timing_cache: Path) -> Path:
    """Where segments are kept that belong to a timing cache."""
    return timing_cache.with_name(f"{timing_cache.name}.segments")


@dataclass(frozen=True)
class SegmentCache:
    """Kept segments of one builder and target; without a folder it knows and keeps nothing.

    A file that is damaged, or of another builder, does not answer.
    """

    folder: Path | None
    package: str
    version: str
    sm: int
    gpu: str = ""

    def get(self, model: bytes, profiles: Sequence[SegmentProfile]) -> Built | None:
        """What was built from the ONNX model with these profiles."""
        if self.folder is None:
            return None
        path = self.folder / f"{self.key(model, profiles)}.plan"
        try:
            told = json.loads(path.with_suffix(".json").read_text())
            plan = path.read_bytes()
            if told["sha256"] != hashlib.sha256(plan).hexdigest():
                return None
            return Built(plan, tuple(map(str, told["layers"])), float(told["seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, model: bytes, profiles: Sequence[SegmentProfile], built: Built) -> None:
        """Keep it; each file appears whole. Raises UsageError where the folder cannot be written."""
        self.put_as(self.key(model, profiles), built)

    def put_as(self, key: str, built: Built) -> None:
        """The same under the name that `key` has given it."""
        if self.folder is None:
            return
        path = self.folder / f"{key}.plan"
        told = {
            "package": self.package,
            "version": self.version,
            "sm": self.sm,
            "gpu": self.gpu,
            "sha256": hashlib.sha256(built.plan).hexdigest(),
            "seconds": round(built.seconds, 3),
            "layers": list(built.layers),
        }
        try:
            self.folder.mkdir(exist_ok=True)
            _replace(path, built.plan)
            _replace(path.with_suffix(".json"), (json.dumps(told, indent=1) + "\n").encode())
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written: {error.strerror or error}") from None

    def key(self, model: bytes, profiles: Sequence[SegmentProfile]) -> str:
        """The name under which a segment is kept: all that it depends on."""
        identity = (SETTINGS_VERSION, self.package, self.version, self.sm, self.gpu, encode(list(profiles)))
        return hashlib.sha256(json.dumps(identity).encode() + model).hexdigest()[:32]


def take_over(earlier: Path, timing_cache: Path) -> None:
    """Put segments that lie beside another timing cache beside this one, where it has none of that name.

    Raises UsageError where that cannot be read or written.
    """
    source, target = kept_folder(earlier), kept_folder(timing_cache)
    if not source.is_dir() or (target.exists() and target.samefile(source)):
        return
    try:
        target.mkdir(exist_ok=True)
        for path in (*source.glob("*.plan"), *source.glob("*.json")):  # the description comes last
            if not (target / path.name).exists():
                _replace(target / path.name, path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"segments of {source} cannot be put into {target}: {error.strerror or error}"
        ) from None


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
