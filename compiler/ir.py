"""The IR: what remains of a model after fusion, in about twenty ops.

Values are activations whose leading dimension is a symbol (`T` packed token rows, `R` logit
rows); operands are strided windows of values, so that splitting and reshaping cost nothing.
The text form is stable: it is printed, saved in the engine, hashed and parsed back.

    tapeout-ir 1
    input token_ids int32[T]
    weight model.embed_tokens.weight float32[300,64]
    %0 float32[T,64] = embedding(token_ids; model.embed_tokens.weight)
    %4 float32[T,6,16] = rope(%3[T,6,16|128,16,1], %2) {interleaved=false}
    logits %9
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tapeout.plugins.op import AttrValue
from tapeout.runtime.engine.program import Dim

IR_VERSION = 1
IR_TEXT = "graph.ir"  # name of the text form among an engine's texts


@dataclass(frozen=True)
class Value:
    """An activation or a step input, contiguous."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Operand:
    """A window of a value: shape, strides and offset in elements."""

    value: str
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class WeightType:
    """dtype and shape of a weight; its bytes are made from the recipe of the same name."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One op. `weights` names weights in schema order, "" where an optional one is absent."""

    op: str
    inputs: tuple[Operand, ...]
    weights: tuple[str, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, AttrValue]


@dataclass(frozen=True)
class Module:
    """A whole model: inputs, weights, nodes in execution order, and where the logits are."""

    inputs: tuple[Value, ...]
    weights: Mapping[str, WeightType]
    nodes: tuple[Node, ...]
    logits: Operand

    def values(self) -> dict[str, Value]:
        """All values by name."""
        return {v.name: v for v in (*self.inputs, *(o for n in self.nodes for o in n.outputs))}

    def digest(self) -> str:
        """SHA-256 of the text form: the identity of the computation."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def text(self) -> str:
        values = self.values()
        lines = [f"tapeout-ir {IR_VERSION}"]
        lines += [f"input {v.name} {_type(v.dtype, v.shape)}" for v in self.inputs]
        lines += [f"weight {name} {_type(w.dtype, w.shape)}" for name, w in self.weights.items()]
        for node in self.nodes:
            outputs = ", ".join(f"{v.name} {_type(v.dtype, v.shape)}" for v in node.outputs)
            arguments = ", ".join(_operand(o, values[o.value]) for o in node.inputs)
            if node.weights:
                arguments += "; " + ", ".join(w or "-" for w in node.weights)
            attrs = ", ".join(f"{k}={json.dumps(v)}" for k, v in sorted(node.attrs.items()))
            lines.append(f"{outputs} = {node.op}({arguments})" + (f" {{{attrs}}}" if attrs else ""))
        lines.append(f"logits {_operand(self.logits, values[self.logits.value])}")
        return "\n".join(lines) + "\n"


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; the leading dimension may be a symbol."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * int(size))
    return tuple(reversed(strides))


def whole(value: Value) -> Operand:
    """The operand that covers a value."""
    return Operand(value.name, value.shape, contiguous_strides(value.shape))


def _type(dtype: str, shape: tuple[Dim, ...]) -> str:
    return f"{dtype}[{_dims(shape)}]"


def _dims(dims: tuple[Dim, ...]) -> str:
    return ",".join(map(str, dims))


def _operand(operand: Operand, value: Value) -> str:
    if operand == whole(value):
        return operand.value
    offset = f"|{operand.offset}" if operand.offset else ""
    return f"{operand.value}[{_dims(operand.shape)}|{_dims(operand.strides)}{offset}]"


_TYPED = re.compile(r"(\S+) (\w+)\[([^\]]*)\]")
_JSON = json.JSONDecoder()
_NODE = re.compile(r"(?P<outputs>.+?) = (?P<op>\w+)\((?P<arguments>.*?)\)(?: \{(?P<attrs>.*)\})?")
_OPERAND = re.compile(r"([^\s,\[\]]+)(?:\[([^\]|]*)\|([^\]|]*)(?:\|(\d+))?\])?")


def parse(text: str) -> Module:
    """The inverse of `Module.text`; raises ValueError with the line for anything else."""
    lines = text.splitlines()
    if not lines or lines[0] != f"tapeout-ir {IR_VERSION}":
        raise ValueError(f"not IR of version {IR_VERSION}: {lines[:1]}")
    inputs: list[Value] = []
    weights: dict[str, WeightType] = {}
    nodes: list[Node] = []
    values: dict[str, Value] = {}
    logits = None
    for number, line in enumerate(lines[1:], start=2):
        keyword, _, rest = line.partition(" ")
        try:
            if keyword == "input":
                inputs += _parse_values(rest)
                _define(values, inputs[-1:])
            elif keyword == "weight":
                (weight,) = _parse_values(rest)
                weights[weight.name] = WeightType(weight.dtype, tuple(int(d) for d in weight.shape))
            elif keyword == "logits":
                (logits,) = _parse_operands(rest, values)
            else:
                nodes.append(_parse_node(line, values, weights))
                _define(values, nodes[-1].outputs)
        except ValueError as error:
            raise ValueError(f"IR line {number} cannot be read: {line!r}: {error}") from error
    if logits is None:
        raise ValueError("IR has no logits line")
    return Module(tuple(inputs), weights, tuple(nodes), logits)


def _define(values: dict[str, Value], new: Sequence[Value]) -> None:
    if twice := [v.name for v in new if v.name in values]:
        raise ValueError(f"values {twice} are defined already")
    values.update((v.name, v) for v in new)


def _parse_node(line: str, values: Mapping[str, Value], weights: Mapping[str, WeightType]) -> Node:
    match = _NODE.fullmatch(line)
    if match is None:
        raise ValueError("expected `outputs = op(inputs; weights) {attrs}`")
    operands, _, names = match["arguments"].partition("; ")
    used = tuple("" if w == "-" else w for w in names.split(", ")) if names else ()
    if unknown := [w for w in used if w and w not in weights]:
        raise ValueError(f"weights {unknown} are not declared")
    return Node(
        match["op"],
        tuple(_parse_operands(operands, values)),
        used,
        tuple(_parse_values(match["outputs"])),
        _parse_attrs(match["attrs"] or ""),
    )


def _parse_attrs(text: str) -> dict[str, AttrValue]:
    """`key=value, ...`; values are JSON, so a text may hold commas and equal signs."""
    attrs: dict[str, AttrValue] = {}
    at = 0
    while at < len(text):
        equals = text.index("=", at)
        value, end = _JSON.raw_decode(text, equals + 1)
        if text[end : end + 2] not in ("", ", "):
            raise ValueError(f"expected `, ` after attribute {text[at:end]!r}")
        attrs[text[at:equals]] = value
        at = end + 2
    return attrs


def _parse_values(text: str) -> Iterator[Value]:
    for item in text.split(", "):
        match = _TYPED.fullmatch(item)
        if match is None:
            raise ValueError(f"expected `name dtype[shape]`, got {item!r}")
        yield Value(match[1], match[2], _parse_dims(match[3]))


def _parse_operands(text: str, values: Mapping[str, Value]) -> Iterator[Operand]:
    for item in text.split(", ") if text else ():
        match = _OPERAND.fullmatch(item)
        if match is None:
            raise ValueError(f"expected `value` or `value[shape|strides|offset]`, got {item!r}")
        name, shape, strides, offset = match.groups()
        if name not in values:
            raise ValueError(f"value {name!r} is not defined above")
        if shape is None:
            yield whole(values[name])
        else:
            yield Operand(name, _parse_dims(shape), tuple(map(int, strides.split(","))), int(offset or 0))


def _parse_dims(text: str) -> tuple[Dim, ...]:
    dims: list[Dim] = [int(d) if d.isdigit() else d for d in text.split(",")]
    if bad := [d for d in dims if isinstance(d, str) and not d.isidentifier()]:
        raise ValueError(f"dimensions {bad} are neither sizes nor symbols")
    return tuple(dims)
