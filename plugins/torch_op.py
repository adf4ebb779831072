"""Registration of an op's reference as the torch custom op `tapeout::<name>`.

The torch signature is derived from the OpSchema, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tapeout.plugins.op import OpSchema

_TYPE_NAMES = {int: "int", float: "float", str: "str", bool: "bool"}
_registered: dict[str, Any] = {}


def torch_signature(schema: OpSchema, mutates: tuple[str, ...] = ()) -> str:
    """The op's torch schema string: inputs, weights, step inputs, attributes."""
    arguments = []
    for name in (*schema.inputs, *schema.weights, *schema.step_inputs):
        if name in mutates:
            arguments.append(f"Tensor({chr(ord('a') + mutates.index(name))}!) {name}")
        else:
            arguments.append(f"Tensor? {name[:-1]}" if name.endswith("?") else f"Tensor {name}")
    arguments += [f"{_TYPE_NAMES[kind]} {name}" for name, kind in schema.attrs.items()]
    results = ", ".join(["Tensor"] * len(schema.outputs))
    return f"({', '.join(arguments)}) -> {results if len(schema.outputs) == 1 else f'({results})'}"


def register_torch_op(
    schema: OpSchema,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> None:
    """Register `tapeout::<name>`; a second call for the same name does nothing.

    `fake` gets the same arguments and returns empty tensors of the right shape and dtype.
    """
    if schema.name in _registered:
        return
    op = torch.library.custom_op(
        f"tapeout::{schema.name}", reference, mutates_args=mutates, schema=torch_signature(schema, mutates)
    )
    op.register_fake(fake)
    _registered[schema.name] = op
