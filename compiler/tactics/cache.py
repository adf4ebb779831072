"""The timing cache: what was measured once, for whom, so that a warm build times nothing.

A JSON file that people may read and keep in CI. An entry is keyed by the op signature, the
machine and the kernels, so a cache from another machine simply does not answer. Timings of GPUs
stand in the same file (see gpu_cache.py).
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapeout.compiler.files import remove_leftovers, write_text
from tapeout.compiler.tactics.outcome import Outcome
from tapeout.plugins.errors import UsageError

if TYPE_CHECKING:
    from tapeout.runtime.engine.manifest import Limits

CACHE_VERSION = 1
_MAX_TIME_US = 1e12  # eleven days
_HEX_64 = re.compile(r"[0-9a-f]{128}")  # 64 bytes


@dataclass(frozen=True)
class Machine:
    """Everything beside the signature that a timing depends on.

    Attributes:
        cpu: processor name. level: instruction set. threads: used for one op.
        kernels: digest of kernel sources, flags and compiler. torch: version, for library tactics.
        conditions: limits that shape the cases.
    """

    cpu: str
    level: str
    threads: int
    kernels: str
    torch: str
    conditions: str


def cpu_conditions(limits: Limits) -> str:
    """The limits that shape what is timed on a CPU: `Machine.conditions`."""
    return f"batch {limits.max_batch_size}, length {limits.max_seq_len}, page {limits.tokens_per_page}"


@dataclass
class TimingCache:
    """Outcomes by (signature, machine), rows and tactic; `hits` and `misses` count look-ups."""

    path: Path | None
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    changed: bool = False

    @classmethod
    def load(cls, path: Path | None) -> TimingCache:
        """Read the file; a path that does not exist yet is an empty cache.

        Raises UsageError when the file is no timing cache of this version.
        """
        if path is None or not path.exists():
            return cls(path)
        try:
            data = json.loads(path.read_text())
            if not isinstance(data, dict) or not {"version", "entries"} <= data.keys():
                raise ValueError("it is no object with 'version' and 'entries'")
            if data["version"] != CACHE_VERSION:
                raise ValueError(f"version {data['version']}, expected {CACHE_VERSION}")
            return cls(path, _checked(data["entries"]))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} is not a timing cache: {error}",
                hint="delete the file or name another one; it is made anew",
            ) from error

    def get(
        self, signature: str, machine: Machine, rows: int, tactics: set[str]
    ) -> dict[str, Outcome] | None:
        """Outcomes of `tactics` by name, or None when one of them was never measured."""
        entry = self.entries.get(_key(signature, machine), {}).get("rows", {}).get(str(rows), {})
        if not tactics <= entry.keys():
            self.misses += 1
            return None
        self.hits += 1
        return {
            name: Outcome(entry[name].get("time_us"), entry[name].get("reason")) for name in sorted(tactics)
        }

    def put(self, signature: str, machine: Machine, rows: int, outcomes: dict[str, Outcome]) -> None:
        """Record outcomes; `save` writes them."""
        self.changed = True
        key = _key(signature, machine)
        entry = self.entries.setdefault(key, {"signature": signature, "machine": vars(machine), "rows": {}})
        known = entry["rows"].setdefault(str(rows), {})
        known |= {
            name: {"time_us": o.time_us} if o.time_us is not None else {"reason": o.reason}
            for name, o in outcomes.items()
        }

    def save(self) -> None:
        """Write the file through a temporary name, so that an interrupted build leaves the old one.

        Nothing is written when nothing new was measured. Raises UsageError when it cannot be written.
        """
        if self.path is None or not self.changed:
            return
        # What another build wrote meanwhile stays.
        self.add_missing(TimingCache.load(self.path))
        data = {"version": CACHE_VERSION, "entries": dict(sorted(self.entries.items()))}
        try:
            remove_leftovers(self.path)
            write_text(self.path, json.dumps(data, indent=1, sort_keys=True))
        except (OSError, UsageError) as error:
            raise UsageError(
                f"timing cache {self.path} cannot be written: {getattr(error, 'strerror', None) or error}",
                hint="name a file in a directory you may write to",
            ) from error

    def add_missing(self, other: TimingCache) -> None:
        """Take over what `other` knows and this cache does not; `save` writes it."""
        for key, theirs in other.entries.items():
            if key not in self.entries:
                self.changed = True
            rows = self.entries.setdefault(key, copy.deepcopy(theirs))["rows"]
            for count, outcomes in theirs["rows"].items():
                if outcomes.keys() - rows.get(count, {}).keys():
                    self.changed = True
                rows[count] = {**outcomes, **rows.get(count, {})}


def _checked(entries: Any) -> dict[str, dict[str, Any]]:
    """The entries when every one has the form `put` gives them; ValueError names the first other."""
    if not isinstance(entries, dict):
        raise ValueError(f"entries are {type(entries).__name__}, expected an object")
    for key, entry in entries.items():
        rows = entry.get("rows") if isinstance(entry, dict) else None
        outcomes: list[Any] = list(rows.values()) if isinstance(rows, dict) else [None]
        if not all(isinstance(o, dict) and all(map(_is_outcome, o.values())) for o in outcomes):
            raise ValueError(f"entry {key} does not hold timings or reasons by rows and tactic")
        if "order" in entry and not all(map(_is_step, (s for o in outcomes for s in o.values()))):
            raise ValueError(f"entry {key} does not hold times of steps with their winners")
        if "region" in entry and not all(map(_is_region, (s for o in outcomes for s in o.values()))):
            raise ValueError(f"entry {key} does not hold times of regions with their segments")
        if ("gpu" in entry or "region" in entry) and not _is_gpu(entry.get("gpu")):
            raise ValueError(f"entry {key} does not say which GPU it is of")
    return entries


def _is_outcome(outcome: Any) -> bool:
    if not isinstance(outcome, dict):
        return False
    time, reason = outcome.get("time_us"), outcome.get("reason")
    if time is None:
        return isinstance(reason, str)
    if not _is_algorithm(outcome.get("algorithm")):
        return False
    # A comparison, since an integer may be larger than any float; False for NaN.
    return type(time) in (int, float) and 0 <= time < _MAX_TIME_US


def _is_step(outcome: dict[str, Any]) -> bool:
    """An outcome: has it what `gpu_cache.GpuTimings.put_step` gives it?"""
    if outcome.get("time_us") is None:
        return True
    winners = outcome.get("winners")
    if not isinstance(winners, dict) or not all(isinstance(w, str) for w in winners.values()):
        return False
    return outcome.get("alone_us") is not None and _is_outcome({"time_us": outcome["alone_us"]})


def _is_region(outcome: dict[str, Any]) -> bool:
    """An outcome: has it what `gpu_cache.GpuTimings.put_region` gives it?"""
    texts = ("own", "segment", "package", "version", "builder_gpu")
    if outcome.keys() != {*texts, "time_us", "own_us", "reason", "unavailable"}:
        return False
    if not all(isinstance(outcome[name], str) for name in texts) or type(outcome["unavailable"]) is not bool:
        return False
    return outcome["time_us"] is None or _is_outcome({"time_us": outcome["own_us"]})


def _is_algorithm(algorithm: Any) -> bool:
    """None, or the fields of `plugins.cuda.MatmulAlgorithm`?"""
    if algorithm is None:
        return True
    if not isinstance(algorithm, dict) or algorithm.keys() != {"data", "version", "workspace_bytes"}:
        return False
    version, size, data = algorithm["version"], algorithm["workspace_bytes"], algorithm["data"]
    numbers = type(version) is int and version >= 10000 and type(size) is int and size >= 0
    return numbers and isinstance(data, str) and _HEX_64.fullmatch(data) is not None


def _is_gpu(gpu: Any) -> bool:
    """Does it have the fields of `gpu_cache.Gpu`?"""
    if not isinstance(gpu, dict) or not isinstance(gpu.get("name"), str):
        return False
    numbers = {"sm", "sm_count", "memory_gib"}
    return gpu.keys() == {"name", *numbers} and all(type(gpu[n]) is int for n in numbers)


def _key(signature: str, machine: Machine) -> str:
    text = json.dumps([signature, vars(machine)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
