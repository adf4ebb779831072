"""Segments that were built before, in a folder beside the timing cache.

TensorRT's builder numbers the parts of an engine in an order that differs from run to run: two builds of one
region have the same layers and the same size, and not always the same bytes. What was built once is kept, so
that the same inputs and caches give the same engine, as for times (DESIGN.md decision 13); and it saves time.

Times belong to bytes. Two builds of one region, each timed on a GPU of its own, stand side by side:
`KEY-DIGEST.plan` with its description, `KEY-DIGEST.json`, which is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.files import remove_leftovers, temporary_file
from tapeout.compiler.tensorrt.builder import SETTINGS_VERSION, Built
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.codec import encode
from tapeout.runtime.engine.launches import SegmentProfile

#: Of a segment's SHA-256, so many digits stand in its name.
_NAME_DIGITS = 16
_ELSEWHERE = "name a timing cache in a directory you may write to; its segments lie in CACHE.json.segments"


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

    def get(
        self, model: bytes, profiles: Sequence[SegmentProfile], wanted: Sequence[str] = ()
    ) -> Built | None:
        """What was built from the ONNX model with these profiles.

        wanted: SHA-256s of segments, the best first; where none of them is kept, another one is taken.
        """
        if self.folder is None:
            return None
        place = {sha256: number for number, sha256 in enumerate(wanted)}
        kept = [pair for path in _kept(self.folder, self.key(model, profiles)) if (pair := _Pair.read(path))]
        kept.sort(key=lambda pair: (place.get(pair.sha256, len(place)), pair.sha256))
        return kept[0].built if kept else None

    def put(self, model: bytes, profiles: Sequence[SegmentProfile], built: Built) -> None:
        """Keep it; each file appears whole. Raises UsageError where the folder cannot be written."""
        self.put_as(self.key(model, profiles), built)

    def put_as(self, key: str, built: Built) -> None:
        """The same under the name that `key` has given it."""
        if self.folder is None:
            return
        sha256 = hashlib.sha256(built.plan).hexdigest()
        told = {
            "package": self.package,
            "version": self.version,
            "sm": self.sm,
            "gpu": self.gpu,
            "sha256": sha256,
            "seconds": round(built.seconds, 3),
            "layers": list(built.layers),
        }
        try:
            self.folder.mkdir(exist_ok=True)
            remove_leftovers(self.folder / "*")
            path = self.folder / f"{key}-{sha256[:_NAME_DIGITS]}.json"
            _write(path, built.plan, (json.dumps(told, indent=1) + "\n").encode())
        except OSError as error:
            raise UsageError(
                f"folder of segments {self.folder} cannot be written: {error.strerror or error}",
                hint=_ELSEWHERE,
            ) from None

    def key(self, model: bytes, profiles: Sequence[SegmentProfile]) -> str:
        """The name under which a segment is kept: all that it depends on."""
        identity = (SETTINGS_VERSION, self.package, self.version, self.sm, self.gpu, encode(list(profiles)))
        return hashlib.sha256(json.dumps(identity).encode() + model).hexdigest()[:32]


def take_over(earlier: Path, timing_cache: Path) -> None:
    """Put segments that lie beside another timing cache beside this one, where none of that name is whole.

    Raises UsageError where that cannot be read or written.
    """
    source, target = kept_folder(earlier), kept_folder(timing_cache)
    if not source.is_dir() or (target.exists() and target.samefile(source)):
        return
    try:
        target.mkdir(exist_ok=True)
        remove_leftovers(target / "*")
        for path in _kept(source):
            pair = _Pair.read(path)
            if pair is not None and _Pair.read(target / path.name) is None:
                _write(target / path.name, pair.built.plan, pair.description)
    except OSError as error:
        raise UsageError(
            f"segments of {source} cannot be put into {target}: {error.strerror or error}", hint=_ELSEWHERE
        ) from None


@dataclass(frozen=True)
class _Pair:
    """A segment and its description, which belong together."""

    built: Built
    sha256: str
    description: bytes

    @classmethod
    def read(cls, path: Path) -> _Pair | None:
        """What the description at `path` tells of the plan beside it; None where one of them is missing,
        damaged or of another."""
        try:
            description, plan = path.read_bytes(), path.with_suffix(".plan").read_bytes()
            told, sha256 = json.loads(description), hashlib.sha256(plan).hexdigest()
            if told["sha256"] != sha256:
                return None
            built = Built(plan, tuple(map(str, told["layers"])), float(told["seconds"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return cls(built, sha256, description)


def _kept(folder: Path, key: str = "*") -> Iterator[Path]:
    """Descriptions of what was built for a key, or for any."""
    return folder.glob(f"{key}-*.json")


def _write(path: Path, plan: bytes, description: bytes) -> None:
    """Write a pair, the description (at `path`) last: a plan without one is not looked at."""
    for place, data in ((path.with_suffix(".plan"), plan), (path, description)):
        with temporary_file(place) as (temporary, file):
            file.write(data)
            file.flush()
            temporary.replace(place)
