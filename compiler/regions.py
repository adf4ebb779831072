"""Dense regions: the runs of ops between two that TensorRT must not run, and what crosses their borders.

A region is a run of consecutive nodes without attention (or another op outside `DENSE_OPS`) in it: o_proj to
the next QKV, embedding to the first QKV, the last o_proj to the logits. Its body is the same computation with
neutral names, so that all layers of one shape have equal bodies, hence one segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tapeout.compiler.ir import Module, Node, Operand, Value, WeightType, whole
from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.registry import OPS

#: Ops that `region_onnx` can write in ops of the ONNX standard. Experts and routers are not among them.
DENSE_OPS = frozenset(
    {
        "activation", "add", "add_rms_norm", "copy", "embedding", "gated_activation", "layer_norm", "linear",
        "linear_add", "mul", "mul_weight", "norm_linear", "rms_norm", "rope", "rope_table", "scale",
        "select_rows", "xielu",
    }
)  # fmt: skip
#: A run without one of these is moves and a few sums: nothing a compiler of dense regions makes faster.
_PRODUCTS = frozenset({"linear", "linear_add", "norm_linear"})


@dataclass(frozen=True)
class Body:
    """A region's computation by itself: values `x0`, `x1`, ..., weights `w0`, `w1`, ... in order of use.

    `outputs` names the values that later ops read. Inputs and outputs cross the border whole.
    """

    inputs: tuple[Value, ...]
    weights: Mapping[str, WeightType]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @cached_property
    def _values(self) -> dict[str, Value]:
        return {v.name: v for v in (*self.inputs, *(o for n in self.nodes for o in n.outputs))}

    def values(self) -> dict[str, Value]:
        """All values by name."""
        return self._values

    @cached_property
    def module(self) -> Module:
        """The body by itself; its logits are the first output."""
        return Module(self.inputs, self.weights, self.nodes, whole(self._values[self.outputs[0]]))

    def text(self) -> str:
        """The stable text form: the IR's, with a line for each output."""
        lines = self.module.text().splitlines()[:-1]
        return "\n".join([*lines, *(f"output {name}" for name in self.outputs)]) + "\n"

    @cached_property
    def digest(self) -> str:
        """Identity of the computation: SHA-256 of its text."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def symbol(self) -> str:
        """The symbol whose row count tells which profile serves a step: T where any value has T rows."""
        return "T" if any(v.shape[0] == "T" for v in self.values().values()) else "R"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Symbols of all that crosses the border."""
        values = self.values()
        crossing = (*self.inputs, *(values[name] for name in self.outputs))
        return tuple(s for s in ("T", "R") if any(v.shape[0] == s for v in crossing))


@dataclass(frozen=True)
class Region:
    """Nodes `[first, last)` of a module; the module's names of the body's inputs, weights and outputs."""

    first: int
    last: int
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    body: Body


def find_regions(module: Module) -> tuple[Region, ...]:
    """All dense regions in order.

    A model without other than dense ops and attention has exactly one more than attention ops.

    Raises TapeoutError where it has another number.
    """
    runs: list[tuple[int, int]] = []
    first = 0
    for index in range(len(module.nodes) + 1):
        if index == len(module.nodes) or module.nodes[index].op not in DENSE_OPS:
            if any(n.op in _PRODUCTS for n in module.nodes[first:index]):
                runs.append((first, index))
            first = index + 1
    cuts = [n for n in module.nodes if n.op not in DENSE_OPS]
    attention = sum(OPS[n.op].reads_cache for n in cuts)
    if len(cuts) == attention and len(runs) != attention + 1:
        raise TapeoutError(
            f"the program has {attention} attention ops and {len(runs)} dense regions, expected "
            f"{attention + 1}: {[f'{a}..{b - 1}' for a, b in runs]}",
            hint="build with --tactics native; `tapeout inspect --program` lists the ops of such an engine",
        )
    return tuple(_region(module, first, last) for first, last in runs)


def distinct_bodies(regions: Sequence[Region]) -> dict[str, Body]:
    """Bodies by digest, in order of first use."""
    return {region.body.digest: region.body for region in regions}


def _region(module: Module, first: int, last: int) -> Region:
    nodes, values = module.nodes[first:last], module.values()
    inside = {v.name for n in nodes for v in n.outputs}
    read_later = {o.value for n in module.nodes[last:] for o in n.inputs} | {module.logits.value}
    inputs = tuple(dict.fromkeys(o.value for n in nodes for o in n.inputs if o.value not in inside))
    weights = tuple(dict.fromkeys(w for n in nodes for w in n.weights if w))
    outputs = tuple(v.name for n in nodes for v in n.outputs if v.name in read_later)
    names = {name: f"x{i}" for i, name in enumerate([*inputs, *(v.name for n in nodes for v in n.outputs)])}
    weight_names = {name: f"w{i}" for i, name in enumerate(weights)} | {"": ""}

    def renamed(value: Value) -> Value:
        return replace(value, name=names[value.name])

    def read(operand: Operand) -> Operand:
        return replace(operand, value=names[operand.value])

    body = Body(
        tuple(renamed(values[name]) for name in inputs),
        {weight_names[name]: module.weights[name] for name in weights},
        tuple(
            Node(
                n.op,
                tuple(map(read, n.inputs)),
                tuple(weight_names[w] for w in n.weights),
                tuple(map(renamed, n.outputs)),
                n.attrs,
            )
            for n in nodes
        ),
        tuple(names[name] for name in outputs),
    )
    return Region(first, last, inputs, weights, outputs, body)
