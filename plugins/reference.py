"""Calling an op's torch reference with what a signature, a case or a record gives. Needs torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

import torch

from tapeout.plugins.cpu import StepState
from tapeout.plugins.op import AttrValue, OpSchema
from tapeout.plugins.registry import op


def bind_reference(
    name: str,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    attrs: Mapping[str, AttrValue],
    step: StepState | None = None,
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A closure that computes the outputs of op `name` from what the tensors hold when it runs.

    An op that writes the cache writes that of `step`, which others do not need. `weights` are as
    `OpSchema.place_weights` takes them.
    """
    schema = op(name)
    reference = importlib.import_module(f"tapeout.plugins.{name}.reference").reference
    tensors = (*inputs, *schema.place_weights(weights, attrs))
    values = tuple(attrs[a] for a in schema.attrs)

    def run() -> tuple[torch.Tensor, ...]:
        result = reference(*tensors, *_step_arguments(schema, step), *values)
        return result if isinstance(result, tuple) else (result,)

    return run


def _step_arguments(schema: OpSchema, step: StepState | None) -> tuple[torch.Tensor, ...]:
    """The step tensors the op reads, cut to the size of the step as torch ops take them."""
    if step is None or not schema.step_inputs:
        return ()
    sequences = int(step.counts[1])
    sizes = {"cu_q": sequences + 1, "kv_lens": sequences}
    return tuple(getattr(step, n)[: sizes.get(n)] for n in schema.step_inputs)
