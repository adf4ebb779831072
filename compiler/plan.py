"""From IR to launch program: op signatures, buffers in the arena, records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tapeout.compiler.ir import Module, Node, Operand, Value, whole
from tapeout.compiler.memory_plan import BufferRequest, plan_arena
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.runtime.engine.container import tensor_bytes
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import Buffer, Program, Record, TacticRange, View
from tapeout.runtime.engine.program_check import row_limits

#: Bytes that buffers start at multiples of; TensorRT wants more of the addresses it gets.
ALIGNMENT, SEGMENT_ALIGNMENT = 64, 256
# Attributes that say which instance an op is, not how it computes: all layers share one choice.
_INSTANCE_ATTRS = frozenset({"layer"})


def signature_of(node: Node, module: Module) -> OpSignature:
    """What the tactics of a node are chosen by."""
    values = module.values()
    weights = (module.weights[w] for w in node.weights if w)
    return OpSignature(
        node.op,
        tuple(TensorType(values[o.value].dtype, o.shape) for o in node.inputs),
        tuple(TensorType(w.dtype, w.shape) for w in weights),
        tuple(TensorType(v.dtype, v.shape) for v in node.outputs),
        {k: v for k, v in node.attrs.items() if k not in _INSTANCE_ATTRS},
    )


def signatures_of(module: Module) -> dict[str, OpSignature]:
    """Every distinct signature by key, in order of first use."""
    signatures = (signature_of(node, module) for node in module.nodes)
    return {s.key(): s for s in signatures}


def order_of(module: Module) -> tuple[str, ...]:
    """Keys of the signatures of all ops, as a step runs them."""
    return tuple(signature_of(node, module).key() for node in module.nodes)


def max_rows(shape: tuple[int | str, ...], limits: Limits) -> int:
    """The most rows a value or signature of this shape can have."""
    return row_limits(limits)[str(shape[0])]


def buckets(most: int) -> tuple[int, ...]:
    """Row counts that tactics are timed at, and that GPUs capture steps of: powers of two, and the limit."""
    return tuple(sorted({*(1 << i for i in range(most.bit_length())), most}))


def plan_program(
    module: Module,
    limits: Limits,
    tactics: Mapping[str, tuple[TacticRange, ...]],
    *,
    row_multiple: int = 1,
    spans: Sequence[tuple[int, int]] = (),
) -> Program:
    """The launch program: every value gets its place in the arena for as long as it is needed.

    Rows of matrices are padded to multiples of `row_multiple` elements. `spans` are runs of records
    `[first, last)` that may run as one (a TensorRT segment): what they read and what they write for
    others lives through all of the run, since nothing is known of the order inside.
    """
    alignment = SEGMENT_ALIGNMENT if spans else ALIGNMENT
    offsets, arena_bytes = plan_arena(_requests(module, limits, row_multiple, spans), alignment)
    buffers = tuple(
        Buffer(v.name, v.dtype, v.shape, offsets[v.name], _bytes(v, limits, row_multiple))
        for n in module.nodes
        for v in n.outputs
    )

    records = tuple(record_of(node, module, row_multiple) for node in module.nodes)
    logits = _view(module.logits, module.values(), row_multiple)
    return Program(arena_bytes, buffers, records, logits, signatures_of(module), dict(tactics))


def record_of(node: Node, module: Module, row_multiple: int) -> Record:
    """A node as a launch record; its views go by the values' names."""
    values = module.values()
    return Record(
        node.op,
        tuple(_view(o, values, row_multiple) for o in node.inputs),
        tuple(node.weights),
        tuple(_view(whole(v), values, row_multiple) for v in node.outputs),
        dict(node.attrs),
        signature_of(node, module).key(),
    )


def _view(operand: Operand, values: Mapping[str, Value], row_multiple: int) -> View:
    value = values[operand.value]
    strides = operand.strides
    if len(value.shape) > 1 and strides[0] == row_elements(value, 1):
        strides = (row_elements(value, row_multiple), *strides[1:])
    return View(operand.value, value.dtype, operand.shape, strides, operand.offset)


def _requests(
    module: Module, limits: Limits, row_multiple: int, spans: Sequence[tuple[int, int]]
) -> list[BufferRequest]:
    """Lifetimes in record indices; the logits live until the step ends."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, node in enumerate(module.nodes):
        for operand in node.inputs:
            last[operand.value] = index
        for value in node.outputs:
            first[value.name] = last[value.name] = index
    last[module.logits.value] = len(module.nodes)
    for begin, end in spans:
        for name, index in first.items():
            if begin <= index < end <= last[name]:  # written for others
                first[name] = begin
        for node in module.nodes[begin:end]:
            for operand in node.inputs:
                if first.get(operand.value, end) < begin:
                    last[operand.value] = max(last[operand.value], end - 1)
    return [
        BufferRequest(value.name, _bytes(value, limits, row_multiple), first[value.name], last[value.name])
        for node in module.nodes
        for value in node.outputs
    ]


def _bytes(value: Value, limits: Limits, row_multiple: int) -> int:
    return tensor_bytes(value.dtype, (max_rows(value.shape, limits), row_elements(value, row_multiple)))


def row_elements(value: Value, row_multiple: int) -> int:
    """Elements from one row to the next; a vector's rows are single elements and stay so."""
    if len(value.shape) == 1:
        return 1
    elements = math.prod(int(d) for d in value.shape[1:])
    return -(-elements // row_multiple) * row_multiple
