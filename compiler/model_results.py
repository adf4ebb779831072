"""Recorded comparisons of all model families: what `tapeout models` prints and `--verify` makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tapeout.model_defs.families import RESULTS, families
from tapeout.plugins.errors import UsageError

_VERSIONS = ("tapeout", "torch", "transformers")
_COLUMNS = ("architecture", "model_type", "traced", "parity", "max_abs_logit_diff", "notes")


@dataclass(frozen=True)
class ModelResults:
    """What a run of `--verify` found.

    Attributes:
        date: of the run, UTC. seed: of weights and prompts. versions: of the packages that took part.
        results: one mapping a family, with the fields of `FamilyResult`.
    """

    date: str
    seed: int
    versions: dict[str, str]
    results: tuple[dict[str, Any], ...]

    def rows(self) -> list[dict[str, Any]]:
        """`{architecture, model_type, traced, parity, max_abs_logit_diff, notes}` of every family; notes
        begin with the family's name."""
        titles = {name: known.title for name, known in families().items()}
        rows = []
        for result in self.results:
            title = titles.get(result["family"], result["family"])
            notes = f"{title}: {result['notes']}" if result["notes"] else title
            rows.append({**{c: result[c] for c in _COLUMNS}, "notes": notes})
        return rows

    def joined(self, older: ModelResults) -> ModelResults:
        """With the older results of families that these do not hold, when made under the same conditions."""
        if (older.seed, older.versions) != (self.seed, self.versions):
            return self
        by_name = {r["family"]: r for r in (*older.results, *self.results)}
        return replace(self, results=tuple(by_name[name] for name in families() if name in by_name))

    def text(self) -> str:
        """The file's text."""
        return json.dumps({**asdict(self), "results": list(self.results)}, indent=1) + "\n"


def recorded_results(path: Path = RESULTS) -> ModelResults:
    """The results that come with this version of tapeout.

    Raises UsageError when there is no such file or it is none.
    """
    try:
        data = json.loads(path.read_text())
        return ModelResults(data["date"], data["seed"], data["versions"], tuple(data["results"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no results: {error}", hint="make them: tapeout models --verify all --output FILE"
        ) from error


def verify_families(
    names: Sequence[str], seed: int, told: Callable[[dict[str, Any]], None] = lambda result: None
) -> ModelResults:
    """Verify families by name, one after the other; `told` hears of each when it is done."""
    from tapeout.compiler.verify_family import verify_family

    results = []
    with TemporaryDirectory(prefix="tapeout-verify-") as folder:
        for name in names:  # tiny models share ops, so they share timings
            result = asdict(
                verify_family(families()[name], seed=seed, timing_cache=Path(folder) / "timings.json")
            )
            told(result)
            results.append(result)
    versions = {name: version(name) for name in _VERSIONS}
    return ModelResults(datetime.now(UTC).strftime("%Y-%m-%d"), seed, versions, tuple(results))
