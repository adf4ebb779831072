"""What an op is tested with: cases, tolerances. Plain data; importing it does not import torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.op import AttrValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= absolute + relative * |expected|; NaN and infinity must coincide."""

    absolute: float
    relative: float

    def violation(self, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
        """What is wrong with `actual`, with the worst element; None when it is within tolerance."""
        import torch

        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            return f"got {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
        if self._surely_holds(actual, expected):
            return None
        got, wanted = actual.double(), expected.double()
        finite = torch.isfinite(wanted)
        same = torch.where(finite, False, (got == wanted) | (got.isnan() & wanted.isnan()))
        excess = (got - wanted).abs() - self.absolute - self.relative * wanted.abs()
        bad = ~same & ~(excess <= 0)  # a NaN excess is bad
        if not bool(bad.any()):
            return None
        worst = int(torch.where(bad, torch.nan_to_num(excess, nan=torch.inf, posinf=torch.inf), -1).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape)]
        return (
            f"{int(bad.sum())} of {bad.numel()} elements differ; worst at {index}: got "
            f"{got.flatten()[worst].item():.7g}, expected {wanted.flatten()[worst].item():.7g} "
            f"(tolerance {self.absolute:g} + {self.relative:g} * |expected|)"
        )

    def _surely_holds(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether all is finite and so well within that float32 can tell: most results are, and this is fast.

        A rounding error of float32 is below 1e-7 of what it rounds, hence the margin.
        """
        import torch

        if actual.dtype not in {torch.float32, torch.bfloat16, torch.float16}:
            return bool(torch.equal(actual, expected)) and not actual.dtype.is_floating_point
        got, wanted = actual.float(), expected.float()
        allowed = wanted.abs().mul_(self.relative).add_(self.absolute).mul_(1 - 1e-5)
        # Not a number is within nothing, but anything is within infinity.
        return bool((got - wanted).abs_().le(allowed).all()) and bool(torch.isfinite(allowed.sum()))


@dataclass(frozen=True)
class Case:
    """One signature of an op and the sizes to run it at.

    Attributes:
        signature: types with symbols `T` and `R`; absent optional tensors are left out.
        rows: values of T to try.
        sequences: for ops that read the cache: (query rows, cache length after the step) of
            each sequence; T is then the sum of the query rows.
        tokens_per_page: page size of the cache.
    """

    label: str
    signature: OpSignature
    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 33)
    sequences: tuple[tuple[int, int], ...] = ()
    tokens_per_page: int = 32


@dataclass(frozen=True)
class Sampling:
    """What some elements of an op's result depend on, so that few can be known without the rest.

    Without it: a row of the result needs the same rows of the inputs and all weights.

    Attributes:
        columns: operands of which a column of the result needs its own row (weights) or column (inputs)
            alone; of an operand with m times as many, m of them, N apart.
        gathered: operand to the input with the ids of the rows that it is read at.
    """

    columns: tuple[str, ...] = ()
    gathered: Mapping[str, str] = field(default_factory=dict)


def signature(
    op: str,
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    weights: tuple[TensorType, ...] = (),
    attrs: Mapping[str, AttrValue] | None = None,
) -> OpSignature:
    """An OpSignature in the order cases are written in."""
    return OpSignature(op, inputs, weights, outputs, attrs or {})


def cases(op: str) -> tuple[Case, ...]:
    """The cases of op `op`."""
    found: tuple[Case, ...] = importlib.import_module(f"tapeout.plugins.{op}.cases").CASES
    return found


def tolerance(op: str, dtype: str) -> Tolerance:
    """The tolerance of op `op` for outputs of `dtype`; KeyError when the op does not support it."""
    found: Tolerance = importlib.import_module(f"tapeout.plugins.{op}.cases").TOLERANCE[dtype]
    return found


def cache_tolerance(op: str, dtype: str) -> Tolerance:
    """How far op `op` may differ in what it writes into a cache of `dtype`; by default not at all."""
    found: Mapping[str, Tolerance] = getattr(
        importlib.import_module(f"tapeout.plugins.{op}.cases"), "CACHE_TOLERANCE", {}
    )
    return found.get(dtype, Tolerance(0.0, 0.0))


def sampling(op: str) -> Sampling:
    """What the results of op `op` depend on, as its cases say."""
    found: Sampling = getattr(importlib.import_module(f"tapeout.plugins.{op}.cases"), "SAMPLING", Sampling())
    return found
