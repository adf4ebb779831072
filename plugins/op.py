"""What an op is: its name, its arguments and where its parts are found.

An op is one folder of `plugins/`. The schema here is plain data: reading it imports
neither torch nor a kernel. The same schema serves the traced graph (as the torch
custom op `tapeout::<name>`), the IR and the launch records of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

AttrValue = int | float | str | bool
W = TypeVar("W")


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
        latents: inputs that together are what the cache holds of a token, half of it in the place of the key
            and half in that of the value; () for ops that cache keys and values.
        matrices: weights [..., K] that products sum over: random ones are made small enough that results stay
            about as large as inputs.
        weights_if: optional weight (without "?") to the bool attribute that says whether it is there.
    """

    name: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    attrs: Mapping[str, type] = field(default_factory=dict)
    step_inputs: tuple[str, ...] = ()
    weights_if: Mapping[str, str] = field(default_factory=dict)
    latents: tuple[int, ...] = ()
    matrices: tuple[str, ...] = ()

    @property
    def reads_cache(self) -> bool:
        """The op attends over the KV cache and writes it: rows belong to sequences, q, k, v come first."""
        return "kv_pool" in self.step_inputs

    def cache_shape(self, inputs: Sequence[Sequence[int | str]]) -> tuple[int, int]:
        """(kv heads, head dim) of the cache of an op that reads it, by the shapes of its inputs."""
        if self.latents:
            return 1, sum(int(inputs[i][-1]) for i in self.latents) // 2
        return int(inputs[1][-2]), int(inputs[1][-1])

    def place_weights(self, given: Sequence[W], attrs: Mapping[str, AttrValue]) -> tuple[W | None, ...]:
        """One entry for each of `weights`, None where an optional one is absent.

        `given` has an entry for each already, or the present ones alone, in order, as signatures have.
        """
        if len(given) == len(self.weights):
            return tuple(given)
        left = iter(given)
        absent = {name for name, attr in self.weights_if.items() if not attrs[attr]}
        return tuple(None if n.rstrip("?") in absent else next(left, None) for n in self.weights)
