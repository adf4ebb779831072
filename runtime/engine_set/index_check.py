"""What makes the index of an engine set sound, beyond keys and types."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapeout.runtime.engine_set.index import EngineEntry, EngineSetIndex

#: Names that any file system and any object store take as they are. No leading dot: those are temporary.
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
#: Also a directory's name: `DIR/<model>`.
MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
ENGINE_SUFFIX = ".engine"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TARGET = re.compile(r"cpu:\w+|cuda:sm_(?P<sm>\d{2,3})|cuda:(?P<sku>[a-z][a-z0-9]*)")


def index_problems(index: EngineSetIndex, index_format: str, version: int) -> list[str]:
    """Everything that is wrong with an index whose fields have the right types; empty when it is sound."""
    problems = []
    if (index.format, index.format_version) != (index_format, version):
        problems.append(
            f"format is {index.format!r} {index.format_version}, expected {index_format!r} {version}"
        )
    if not MODEL_NAME.fullmatch(index.model):
        problems.append(
            f"model is {index.model!r}, expected a name of letters, digits and . _ + - that begins with none "
            "of . + -"
        )
    if not index.source:
        problems.append("source is empty, expected what the model came from")
    if not index.engines:
        problems.append("engines is empty, expected at least one")
    for i, entry in enumerate(index.engines):
        problems += _engine_problems(entry, f"engines[{i}] {entry.file!r}")
    known, used = {w.file for w in index.weights}, {name for e in index.engines for name in e.weights}
    for i, shared in enumerate(index.weights):
        where = f"weights[{i}] {shared.file!r}"
        problems += _file_problems(shared.file, shared.size_bytes, shared.sha256, where)
        if shared.file not in used:
            problems.append(f"{where} belongs to no engine")
    for name in sorted(used - known):
        owners = ", ".join(e.file for e in index.engines if name in e.weights)
        problems.append(f"{owners}: needs {name!r}, which is not among the weights")
    # Case is folded: not every file system tells `A.engine` from `a.engine`.
    engines, weights = [e.file for e in index.engines], [w.file for w in index.weights]
    counts = Counter(name.lower() for name in (*engines, *weights))
    problems += [f"file {name!r} is listed {n} times" for name, n in sorted(counts.items()) if n > 1]
    for what, names in (("engines", engines), ("weights", weights)):
        if names != sorted(names):
            problems.append(f"{what} are not sorted by file name")
    return problems


def _engine_problems(entry: EngineEntry, where: str) -> list[str]:
    problems = _file_problems(entry.file, entry.size_bytes, entry.sha256, where)
    if not entry.file.endswith(ENGINE_SUFFIX):
        problems.append(f"{where}: expected a name that ends in {ENGINE_SUFFIX}")
    match = _TARGET.fullmatch(entry.target)
    if match is None:
        problems.append(
            f"{where}: target is {entry.target!r}, expected cpu:<level>, cuda:<sku> or cuda:sm_NN"
        )
    else:
        problems += _target_problems(entry, match["sku"], int(match["sm"]) if match["sm"] else None, where)
    for name in ("dtype", "quantize", "content_key"):
        if not getattr(entry, name):
            problems.append(f"{where}: {name} is empty")
    for name, value in vars(entry.limits).items():
        if value < 1:
            problems.append(f"{where}: limits.{name} is {value}, expected at least 1")
    if len(set(entry.weights)) != len(entry.weights):
        problems.append(f"{where}: weights names a file twice: {', '.join(entry.weights)}")
    return problems


def _target_problems(entry: EngineEntry, sku: str | None, sm: int | None, where: str) -> list[str]:
    """sku and sm say what the target says; a model's compute capability is the entry's own."""
    problems = []
    if entry.sku != sku:
        problems.append(f"{where}: sku is {entry.sku!r}, its target {entry.target!r} says {sku!r}")
    expected = sm if sku is None else entry.sm
    if entry.sm != expected or (sku is not None and entry.sm is None):
        wanted = "a compute capability times ten" if sku is not None else repr(sm)
        problems.append(f"{where}: sm is {entry.sm!r}, expected {wanted} for target {entry.target!r}")
    return problems


def _file_problems(file: str, size_bytes: int, sha256: str, where: str) -> list[str]:
    problems = []
    if not FILE_NAME.fullmatch(file):
        problems.append(
            f"{where}: expected a file name of letters, digits and . _ + - that begins with none of . + -"
        )
    if size_bytes < 1:
        problems.append(f"{where}: size_bytes is {size_bytes}, expected at least 1")
    if not _SHA256.fullmatch(sha256):
        problems.append(f"{where}: sha256 is {sha256!r}, expected 64 lower-case hex digits")
    return problems
