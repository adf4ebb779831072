"""The IR as an ONNX graph. See the package's docstring for what becomes what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper

from tapeout.compiler.ir import Module, Node, Operand, Value, contiguous_strides, whole
from tapeout.compiler.onnx_export.op_schemas import DOMAIN, ELEMENT_TYPES, updated_outputs
from tapeout.compiler.onnx_export.standard_ops import StandardOp, standard_op
from tapeout.compiler.onnx_export.windows import Reshape, Slice, Step, shape_after, window_steps
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import AttrValue
from tapeout.plugins.registry import op
from tapeout.runtime.engine.manifest import Manifest
from tapeout.runtime.engine.program import Dim, Program

LOGITS = "logits"


@dataclass(frozen=True)
class TensorFile:
    """Where a weight's bytes lie: a path relative to the ONNX file's directory, and a byte range."""

    location: str
    offset: int
    size_bytes: int


def step_tensors(manifest: Manifest) -> dict[str, Value]:
    """Step tensors that ops read beside their inputs. B sequences; see `runtime.step.StepInputs`."""
    kv = manifest.kv_cache
    page = (kv.layers, 2, kv.kv_heads, manifest.limits.tokens_per_page, kv.head_dim)
    return {
        "kv_pool": Value("kv_pool", kv.dtype, ("pages", *page)),
        "page_table": Value("page_table", "int32", ("B", "pages_per_sequence")),
        "cu_q": Value("cu_q", "int32", ("B + 1",)),
        "kv_lens": Value("kv_lens", "int32", ("B",)),
    }


def build_graph(
    module: Module, program: Program, manifest: Manifest, files: Mapping[str, TensorFile]
) -> onnx.GraphProto:
    """The graph of `module`; `files` says where the bytes of each of its weights lie.

    Raises:
        UnsupportedError: windows that reshapes, slices and transposes cannot express, all listed.
    """
    builder = _Builder(module, program, step_tensors(manifest))
    for index, node in enumerate(module.nodes):
        builder.add(index, node)
    builder.add_logits()
    if builder.problems:
        raise UnsupportedError(
            "the engine reads values in ways ONNX cannot express without loss:\n  "
            + "\n  ".join(builder.problems)
        )
    return builder.finish(manifest.model.architecture, files)


@dataclass
class _Builder:
    module: Module
    program: Program
    step_tensors: Mapping[str, Value]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    value_info: dict[str, Value] = field(default_factory=dict)
    windows: dict[Operand, str] = field(default_factory=dict)
    updated: dict[str, int] = field(default_factory=dict)  # step tensor to how often it was changed so far
    used_step_tensors: dict[str, Value] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = self.module.values()
        schemas = [op(node.op) for node in self.module.nodes]
        self.updates = [name for schema in schemas for name in updated_outputs(schema)]

    def add(self, index: int, node: Node) -> None:
        """One node of the IR: nodes for its windows, then exactly one for itself."""
        name = f"{index}_{node.op}"
        inputs = [self.operand(operand, name) for operand in node.inputs]
        outputs = [self.name_of(value) for value in node.outputs]
        for value, output in zip(node.outputs, outputs, strict=True):
            self.value_info[output] = Value(output, value.dtype, value.shape)
        standard = standard_op(node, self.module)
        if standard is not None:
            self.emit_standard(standard, [*inputs, *node.weights], outputs, name)
        else:
            self.emit_custom(node, inputs, outputs, name)
        self.describe(self.nodes[-1], index)

    def emit_standard(
        self, standard: StandardOp, arguments: Sequence[str], outputs: list[str], name: str
    ) -> None:
        chosen = [arguments[i] for i in standard.arguments if i < len(arguments) and arguments[i]]
        chosen += [self.scalar(value) for value in standard.constants]
        attrs: dict[str, Any] = dict(standard.attrs)
        self.nodes.append(helper.make_node(standard.op_type, chosen, outputs, name, **attrs))

    def emit_custom(self, node: Node, inputs: list[str], outputs: list[str], name: str) -> None:
        schema = op(node.op)
        weights = [*node.weights, *[""] * (len(schema.weights) - len(node.weights))]
        arguments = [*inputs, *weights, *(self.step_tensor(s) for s in schema.step_inputs)]
        while not arguments[-1]:
            arguments.pop()  # absent optional arguments at the end are left out, those between are ""
        results = [*outputs, *(self.update(s) for s in updated_outputs(schema))]
        attrs: dict[str, Any] = {key: _attribute(node.attrs[key], kind) for key, kind in schema.attrs.items()}
        self.nodes.append(helper.make_node(node.op, arguments, results, name, domain=DOMAIN, **attrs))

    def add_logits(self) -> None:
        if self.name_of(self.values[self.module.logits.value]) != LOGITS:
            self.operand(self.module.logits, LOGITS, result=LOGITS)

    def name_of(self, value: Value) -> str:
        """IR names are kept; the value that is the logits as a whole gets the output's name."""
        return LOGITS if self.module.logits == whole(value) else value.name

    def operand(self, operand: Operand, reader: str, result: str = "") -> str:
        """The name of the tensor with the operand's contents; equal windows are made once."""
        value = self.values[operand.value]
        if operand == whole(value) and not result:
            return self.name_of(value)
        if operand not in self.windows or result:
            name = result or _text(operand)
            try:
                steps = operand_steps(operand, value)
            except ValueError as error:
                self.problems.append(f"{reader} reads {_text(operand)}: {error}")
                steps = ()
            self.windows[operand] = self.emit_window(name, value, steps)
        return self.windows[operand]

    def emit_window(self, name: str, value: Value, steps: tuple[Step, ...]) -> str:
        """Nodes for `steps`, the last of which makes `name`; the name of the window."""
        source, row = self.name_of(value), _ints(value.shape[1:])
        for i, step in enumerate(steps, start=1):
            target = name if i == len(steps) else f"{name}/{i}"
            row = shape_after(step, row)
            self.emit_step(step, source, target)
            self.value_info[target] = Value(target, value.dtype, (value.shape[0], *row))
            source = target
        if not steps and name == LOGITS:
            self.nodes.append(helper.make_node("Identity", [source], [name], name))
            return name
        return source

    def emit_step(self, step: Step, source: str, target: str) -> None:
        if isinstance(step, Reshape):
            # 0 keeps the leading dimension, whatever it is.
            node = helper.make_node("Reshape", [source, self.ints(0, *step.shape)], [target], target)
        elif isinstance(step, Slice):
            bounds = [self.ints(n) for n in (step.start, step.stop, step.axis + 1)]
            node = helper.make_node("Slice", [source, *bounds], [target], target)
        else:
            order = [0, *(axis + 1 for axis in step.order)]
            node = helper.make_node("Transpose", [source], [target], target, perm=order)
        self.nodes.append(node)

    def step_tensor(self, name: str) -> str:
        """The step tensor as it is now: the graph's input, or what the last op that changed it returned."""
        self.used_step_tensors[name] = self.step_tensors[name]
        count = self.updated.get(name, 0)
        return f"{name}/{count}" if count else name

    def update(self, name: str) -> str:
        """The name of a step tensor after one more change; the last one is an output of the graph."""
        count = self.updated[name] = self.updated.get(name, 0) + 1
        result = f"{name}_out" if count == self.updates.count(name) else f"{name}/{count}"
        before = self.step_tensors[name]
        self.value_info[result] = Value(result, before.dtype, before.shape)
        return result

    def ints(self, *values: int) -> str:
        name = f"int64[{','.join(map(str, values))}]"
        self.constants[name] = helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values)
        return name

    def scalar(self, value: float) -> str:
        name = f"float32[{value!r}]"
        self.constants[name] = helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [value])
        return name

    def describe(self, node: onnx.NodeProto, index: int) -> None:
        """What the engine replays for this node, as metadata."""
        record = self.program.records[index]
        ranges = self.program.tactics.get(record.signature, ())
        tactics = ", ".join(f"{r.tactic} up to {r.max_rows} rows" for r in ranges)
        facts = {"record": str(index), "op": record.op, "signature": record.signature, "tactics": tactics}
        helper.set_metadata_props(node, {f"{DOMAIN}.{key}": text for key, text in facts.items()})

    def finish(self, name: str, files: Mapping[str, TensorFile]) -> onnx.GraphProto:
        logits, results = self.module.logits, sorted({f"{n}_out" for n in self.updates})
        outputs = [Value(LOGITS, self.values[logits.value].dtype, logits.shape)]
        outputs += [self.value_info[result] for result in results]
        inputs = (*self.module.inputs, *self.used_step_tensors.values())
        hidden = {value.name for value in outputs}
        return helper.make_graph(
            self.nodes,
            name,
            [_info(value) for value in inputs],
            [_info(value) for value in outputs],
            [*self.constants.values(), *(self.weight(w, files[w]) for w in self.module.weights)],
            value_info=[_info(v) for n, v in self.value_info.items() if n not in hidden],
        )

    def weight(self, name: str, file: TensorFile) -> onnx.TensorProto:
        kind = self.module.weights[name]
        tensor = onnx.TensorProto(name=name, data_type=ELEMENT_TYPES[kind.dtype], dims=kind.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": file.location, "offset": file.offset, "length": file.size_bytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def operand_steps(operand: Operand, value: Value) -> tuple[Step, ...]:
    """Steps from the value to the operand; ValueError when its rows are not the value's."""
    row_stride = contiguous_strides(value.shape)[0]
    if operand.shape[:1] != value.shape[:1] or operand.strides[0] != row_stride:
        raise ValueError(f"its rows are not those of a value {list(value.shape)}")
    return window_steps(_ints(value.shape[1:]), _ints(operand.shape[1:]), operand.strides[1:], operand.offset)


def _text(operand: Operand) -> str:
    """The operand as the IR's text writes a window."""
    lists = [operand.shape, operand.strides, *([(operand.offset,)] if operand.offset else [])]
    return f"{operand.value}[{'|'.join(','.join(map(str, numbers)) for numbers in lists)}]"


def _ints(dims: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(int(d) for d in dims)


def _info(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ELEMENT_TYPES[value.dtype], value.shape)


def _attribute(value: AttrValue, kind: type) -> AttrValue:
    """ONNX has no booleans; a float that was written as an integer stays a float."""
    return int(value) if kind is bool else kind(value)
