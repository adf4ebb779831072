"""The baseline tactic `aten`: an op's torch reference, its result copied into the output views.

Ops whose speed matters at this level override it in their own folder with `out=` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tapeout.plugins.cpu import BoundCall, CpuTactic
from tapeout.plugins.reference import bind_reference


class AtenTactic(CpuTactic):
    """Runs the reference of op `op_name`; always supported.

    `batch_invariant` may be set only for ops that treat every element alike.
    """

    name = "aten"

    def __init__(self, op_name: str, *, batch_invariant: bool = False) -> None:
        self.op = op_name
        self.batch_invariant = batch_invariant

    def bind(self, call: BoundCall) -> Callable[[], None]:
        reference = bind_reference(self.op, call.inputs, call.weights, call.attrs, call.step)
        return partial(_copy_results, reference, tuple(call.outputs))


def _copy_results(
    reference: Callable[[], tuple[torch.Tensor, ...]], outputs: tuple[torch.Tensor, ...]
) -> None:
    for target, result in zip(outputs, reference(), strict=True):
        target.copy_(result)
