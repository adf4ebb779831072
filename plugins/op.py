"""What an op is: its name, its arguments and where its parts are found.

An op is one folder of `plugins/`. The schema here is plain data: reading it imports
neither torch nor a kernel. The same schema serves the traced graph (as the torch
custom op `tapeout::<name>`), the IR and the launch records of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

AttrValue = int | float | str | bool


@dataclass(frozen=True)
class OpSchema:
    """The signature of one op.

    A name that ends in "?" may be absent. Arguments of the torch custom op stand in
    the order inputs, weights, attrs.

    Attributes:
        name: the op's name, equal to its folder's.
        inputs: activations, in order.
        weights: tensors that come from the checkpoint or are constants, in order.
        outputs: results, in order.
        attrs: attribute name to its type (int, float, str or bool).
        step_inputs: step tensors the op reads beside its inputs (see `StepState`).
    """

    name: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    attrs: Mapping[str, type] = field(default_factory=dict)
    step_inputs: tuple[str, ...] = ()
