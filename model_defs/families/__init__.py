"""What is known of model families, one small file each; see README.md beside this file.

A family needs a file only to be listed and verified by name, or when facts of it shall be checked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from tapeout.plugins.errors import UsageError

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"


@dataclass(frozen=True)
class FamilyFacts:
    """How often fusions match: per decoder layer, unless the name says otherwise.

    Attributes:
        rms_norms: RMSNorm modules in a layer; one final norm comes on top.
        separate_qkv: q, k and v are three linears of one input.
        separate_gate_up: the MLP is `act(gate(x)) * up(x)` with two linears of one input.
        normed_linears: linears (or groups that become one) that alone read a norm.
        added_linears: linears whose result is added to the residual stream as it is.
    """

    rms_norms: int
    separate_qkv: bool = True
    separate_gate_up: bool = True
    normed_linears: int = 2
    added_linears: int = 2


@dataclass(frozen=True)
class Verification:
    """What a family's tiny model is tried with.

    Attributes:
        prompt_lengths: tokens of each prompt; the default's last is longer than any window and than any
            original context of the tiny models.
        new_tokens: ids each prompt is continued by.
        max_seq_len: limit of the engine; 0 is the model's.
    """

    prompt_lengths: tuple[int, ...] = (5, 23, 75)
    new_tokens: int = 12
    max_seq_len: int = 0


@dataclass(frozen=True)
class Family:
    """One file of this folder.

    Attributes:
        name: the file's, what `tapeout models --verify` takes.
        title: what users call it.
        model_type: of transformers.
        facts: match counts, None when they are not known.
        config: what the tiny model's config sets beside the common sizes.
        verify: what the tiny model is tried with.
    """

    name: str
    title: str
    model_type: str
    facts: FamilyFacts | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    verify: Verification = field(default_factory=Verification)


@cache
def families() -> Mapping[str, Family]:
    """All families by name, in alphabetical order."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.toml"))}


def family(name: str) -> Family:
    """The family of this name; raises UsageError naming the nearest one."""
    if name not in families():
        near = get_close_matches(name, families(), n=1)
        raise UsageError(
            f"unknown model family {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else "`tapeout models` lists the families",
        )
    return families()[name]


def _read(path: Path) -> Family:
    data = tomllib.loads(path.read_text())
    known = {"title", "model_type", "facts", "config", "verify"}
    if unknown := sorted(data.keys() - known):
        raise UsageError(
            f"{path.name}: unknown keys {', '.join(unknown)}; expected {', '.join(sorted(known))}"
        )
    verify = {k: tuple(v) if isinstance(v, list) else v for k, v in data.get("verify", {}).items()}
    return Family(
        path.stem,
        data["title"],
        data.get("model_type", path.stem),
        _part(FamilyFacts, data["facts"], path) if "facts" in data else None,
        data.get("config", {}),
        _part(Verification, verify, path),
    )


def _part(kind: Any, values: Mapping[str, Any], path: Path) -> Any:
    known = [f.name for f in fields(kind)]
    if unknown := sorted(values.keys() - set(known)):
        raise UsageError(f"{path.name}: unknown keys {', '.join(unknown)}; expected {', '.join(known)}")
    return kind(**values)
