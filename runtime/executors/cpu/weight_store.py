"""Weights as torch tensors over the mapped file, and what tactics made of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tapeout.plugins.cpu import CpuTactic
from tapeout.plugins.op import AttrValue
from tapeout.runtime.engine.program import Record
from tapeout.runtime.engine.reader import Engine


class WeightStore:
    """Maps each weight once and prepares each (tactic, weights, attributes) once.

    With `release` nothing prepared is kept and `release_after` gives a record's weights back to
    the system, so that a program runs in little more memory than its largest record needs.
    """

    def __init__(self, engine: Engine, *, release: bool = False) -> None:
        self.release = release
        self._engine = engine
        self._tensors: dict[str, torch.Tensor] = {}
        self._prepared: dict[tuple[object, ...], Any] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """The weight, not copied. The mapping is read-only: writing to it ends the process."""
        if name not in self._tensors:
            self._tensors[name] = _map_tensor(self._engine, name)
        return self._tensors[name]

    def prepared(self, tactic: CpuTactic, record: Record) -> Any:
        """What `tactic.prepare` returned for the record's weights and attributes."""
        if self.release:
            return tactic.prepare(self._tensors_of(record.weights), record.attrs)
        key = (tactic.op, tactic.name, record.weights, _attrs_key(record.attrs))
        if key not in self._prepared:
            self._prepared[key] = tactic.prepare(self._tensors_of(record.weights), record.attrs)
        return self._prepared[key]

    def release_after(self, record: Record) -> None:
        """Give the record's mapped weights back to the system."""
        for name in record.weights:
            if name:
                self._engine.release_weight(name)

    def _tensors_of(self, names: Sequence[str]) -> list[torch.Tensor | None]:
        return [self.tensor(name) if name else None for name in names]


def _attrs_key(attrs: Mapping[str, AttrValue]) -> tuple[tuple[str, AttrValue], ...]:
    return tuple(sorted(attrs.items()))


def _map_tensor(engine: Engine, name: str) -> torch.Tensor:
    weight = engine.weight(name)
    dtype = getattr(torch, weight.dtype)
    if math.prod(weight.shape) == 0:  # frombuffer refuses empty buffers
        return torch.empty(weight.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; nothing here writes to weights.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(weight.data, dtype=dtype).reshape(weight.shape)
