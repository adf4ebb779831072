"""The baseline tactic `aten`: an op's torch reference, its result copied into the output views.

Ops whose speed matters at this level override it in their own folder with `out=` calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tapeout.plugins.cpu import BoundCall, CpuTactic
from tapeout.plugins.registry import op


class AtenTactic(CpuTactic):
    """Runs the reference of op `op_name`; always supported.

    `batch_invariant` may be set only for ops that treat every element alike.
    """

    name = "aten"

    def __init__(self, op_name: str, *, batch_invariant: bool = False) -> None:
        self.op = op_name
        self.batch_invariant = batch_invariant

    def bind(self, call: BoundCall) -> Callable[[], None]:
        reference = importlib.import_module(f"tapeout.plugins.{self.op}.reference").reference
        weights = list(call.weights) + [None] * (len(op(self.op).weights) - len(call.weights))
        arguments = (*call.inputs, *weights)
        attrs = dict(call.attrs)
        outputs = tuple(call.outputs)

        if len(outputs) == 1:
            out = outputs[0]

            def run() -> None:
                out.copy_(reference(*arguments, **attrs))
        else:

            def run() -> None:
                for target, result in zip(outputs, reference(*arguments, **attrs), strict=True):
                    target.copy_(result)

        return run
