"""Workload files: points to measure, with prompts given by seeds, shared between engines.

A file holds, as JSON: `version` 1, `vocab`, the id rule's range `id_lo` and `id_hi`, `id_check` (a seed
and its first ids), and any of

    decode   [{batch, prompt_len, output_len, seed_base}]   repetition r, row b: seed_base + 1000 r + b
    prefill  [{prompt_len, output_len, seed_base}]          repetition r: seed_base + r
    mixed    {requests: [{prompt_len, output_len, seed}]}   all given at once

Decoding is greedy and goes on after an end-of-sequence id. Ids follow the rule in `prompts.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.plugins.errors import UsageError
from tapeout.runtime.bench.prompts import prompt_ids

_VERSION = 1
_ROWS_PER_REPETITION = 1000


@dataclass(frozen=True)
class Point:
    """A batch of equal lengths, repeated with new prompts. Lengths in tokens."""

    kind: str  # decode | prefill
    batch: int
    prompt_len: int
    output_len: int
    seed_base: int

    @property
    def name(self) -> str:
        """`decode-8`, `prefill-2048`: how a user picks it."""
        return f"{self.kind}-{self.batch if self.kind == 'decode' else self.prompt_len}"

    def seeds(self, repetition: int) -> list[int]:
        """One seed for each row of the batch."""
        stride = _ROWS_PER_REPETITION if self.kind == "decode" else 1
        return [self.seed_base + stride * repetition + row for row in range(self.batch)]


@dataclass(frozen=True)
class MixedRequest:
    """One request of the mixed point. Lengths in tokens."""

    prompt_len: int
    output_len: int
    seed: int


@dataclass(frozen=True)
class Workload:
    """A checked workload file; `digest` is the SHA-256 of its bytes."""

    name: str
    digest: str
    vocab_size: int
    id_low: int
    id_high: int
    points: tuple[Point, ...]
    mixed: tuple[MixedRequest, ...]

    def ids(self, seed: int, length: int) -> np.ndarray:
        return prompt_ids(seed, length, self.id_low, self.id_high)

    def facts(self) -> dict[str, Any]:
        """What a record says about it."""
        return {"file": self.name, "sha256": self.digest}


def read_workload(path: Path, vocab_size: int) -> Workload:
    """Read a workload made for a vocabulary of `vocab_size` ids.

    Raises UsageError: the file is missing, is no workload, is for another vocabulary, or its
    `id_check` shows that its prompts follow another rule than ours.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"workload {str(path)!r} cannot be read: {error.strerror or error}",
            hint="docs/bench.md says what such a file holds",
        ) from None
    try:
        workload = _parse(json.loads(raw), path.name, hashlib.sha256(raw).hexdigest())
        check = json.loads(raw)["id_check"]
        wanted, found = check["first8"], workload.ids(check["seed"], len(check["first8"])).tolist()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"{path} is not a workload: {_reason(error)}",
            hint="docs/bench.md says what such a file holds",
        ) from None
    if workload.vocab_size != vocab_size:
        raise UsageError(
            f"{path} is for a vocabulary of {workload.vocab_size} ids, the engine's has {vocab_size}",
            hint="make the workload for the engine's vocabulary",
        )
    if wanted != found:
        raise UsageError(
            f"{path}: the prompts follow another rule: id_check expects {wanted}, our rule gives {found}",
            hint="ids must be id_lo + splitmix64(seed * 2^32 + j) mod (id_hi - id_lo)",
        )
    return workload


def _parse(data: Mapping[str, Any], name: str, digest: str) -> Workload:
    if data["version"] != _VERSION:
        raise ValueError(f"version is {data['version']!r}, expected {_VERSION}")
    low, high = _whole(data, "id_lo", least=0), _whole(data, "id_hi")
    if not low < high <= _whole(data, "vocab"):
        raise ValueError(f"id_lo {low}, id_hi {high}, vocab {data['vocab']} are not in this order")
    points = [
        Point("decode", _whole(d, "batch"), _whole(d, "prompt_len"), _whole(d, "output_len", least=2),
              _whole(d, "seed_base", least=0))
        for d in data.get("decode", ())
    ]  # fmt: skip
    points += [
        Point("prefill", 1, _whole(d, "prompt_len"), _whole(d, "output_len"), _whole(d, "seed_base", least=0))
        for d in data.get("prefill", ())
    ]
    mixed = [
        MixedRequest(_whole(r, "prompt_len"), _whole(r, "output_len"), _whole(r, "seed", least=0))
        for r in data.get("mixed", {}).get("requests", ())
    ]
    return Workload(name, digest, data["vocab"], low, high, tuple(points), tuple(mixed))


def _whole(data: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} is {value!r}, expected an integer of at least {least}")
    return value


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def pick(points: tuple[Point, ...], names: tuple[str, ...]) -> tuple[Point, ...]:
    """The points of these names, in the file's order; all of them when no name is given.

    Raises UsageError naming every name that no point has.
    """
    known = [point.name for point in points]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"no point is called {', '.join(map(repr, unknown))}",
            hint=f"the workload has {', '.join(known) or 'none'}",
        )
    return tuple(p for p in points if not names or p.name in names)
