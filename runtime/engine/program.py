"""The launch program of an engine: what is replayed, as frozen data.

A buffer is a region of the arena; a view is a strided window into a buffer or a step
input; a record is one op with its views, weights and attributes. Leading dimensions are
symbolic: `T` packed token rows, `R` logit rows. On `cpu` both are exact at run time and
token ranges only select tactics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tapeout.plugins.cpu import OpSignature
from tapeout.plugins.op import AttrValue
from tapeout.runtime.engine.codec import decode, encode

Dim = int | str
STEP_INPUTS = ("token_ids", "positions", "row_ids")


@dataclass(frozen=True)
class Buffer:
    """Arena bytes `[offset_bytes, offset_bytes + size_bytes)`, sized at the engine's limits."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class View:
    """A strided window; `buffer` names a Buffer or one of STEP_INPUTS.

    `strides` and `offset` count elements of `dtype`.
    """

    buffer: str
    dtype: str
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class Record:
    """One op to launch. `weights` are engine tensor names, "" where an optional one is absent."""

    op: str
    inputs: tuple[View, ...]
    weights: tuple[str, ...]
    outputs: tuple[View, ...]
    attrs: Mapping[str, AttrValue]
    signature: str


@dataclass(frozen=True)
class TacticRange:
    """Tactic `tactic` serves every row count up to `max_rows` not served by an earlier range."""

    max_rows: int
    tactic: str


@dataclass(frozen=True)
class Program:
    """Everything replayed in a step: records in order, the arena, the chosen tactics.

    Attributes:
        arena_bytes: size of the arena at the engine's limits.
        buffers: in order of first use.
        records: in launch order.
        logits: view `[R, vocab]` that holds the step's logits after the last record.
        signatures: signature key to the signature.
        tactics: signature key to ranges with ascending `max_rows`; the last covers the limit.
    """

    arena_bytes: int
    buffers: tuple[Buffer, ...]
    records: tuple[Record, ...]
    logits: View
    signatures: Mapping[str, OpSignature]
    tactics: Mapping[str, tuple[TacticRange, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the engine's metadata; inverse of `from_json`."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """Rebuild a program; raises EngineCorruptError on unknown or missing keys."""
        return decode(cls, data, "program")
