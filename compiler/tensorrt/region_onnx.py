"""A dense region as an ONNX model of standard ops, whose weights are inputs of the network.

Values cross the border as they lie in the arena: [rows, elements of a padded row], vectors as [rows]. So a
segment reads and writes the arena in place; the padding is cut off and put back inside.
"""

from __future__ import annotations

from importlib.metadata import version

import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from tapeout.compiler.ir import Operand, Value
from tapeout.compiler.onnx_export.graph import operand_steps
from tapeout.compiler.onnx_export.windows import Reshape, Slice, Step, shape_after
from tapeout.compiler.plan import row_elements
from tapeout.compiler.regions import Body
from tapeout.compiler.tensorrt.onnx_ops import OPSET, Writer, lower_op
from tapeout.plugins.errors import UnsupportedError
from tapeout.runtime.engine.program import Dim


def border_shape(value: Value, row_multiple: int) -> tuple[Dim, ...]:
    """The shape in which a value crosses the border: [rows] or [rows, padded row elements]."""
    if len(value.shape) == 1:
        return value.shape
    return (value.shape[0], row_elements(value, row_multiple))


def region_onnx(body: Body, row_multiple: int, name: str = "region") -> onnx.ModelProto:
    """The model: inputs are the region's values and then its weights, outputs its outputs, all by the body's
    names; leading dimensions are the symbols T and R.

    Args:
        row_multiple: rows of matrices in the arena are padded to multiples of this many elements.

    Raises UnsupportedError for windows or activations that have no form in ONNX.
    """
    graph = _Region(body, row_multiple).graph(name)
    graph.cleanup().toposort()
    model = gs.export_onnx(graph)
    model.ir_version = helper.find_min_ir_version_for(list(model.opset_import))
    model.producer_name, model.producer_version = "tapeout", version("tapeout")
    onnx.checker.check_model(model)
    return model


class _Region:
    """Writes one body."""

    def __init__(self, body: Body, row_multiple: int) -> None:
        self._body, self._row_multiple, self._writer = body, row_multiple, Writer()
        self._values = body.values()
        self._tensors: dict[str, gs.Variable] = {}  # by value: contiguous, in the value's own shape
        self._windows: dict[Operand, gs.Variable] = {}

    def graph(self, name: str) -> gs.Graph:
        writer, body = self._writer, self._body
        inputs = [self._input(value) for value in body.inputs]
        weights = {n: writer.variable(n, w.dtype, w.shape) for n, w in body.weights.items()}
        for index, node in enumerate(body.nodes):
            writer.scope = f"{index}.{node.op}"
            operands = [self._operand(operand) for operand in node.inputs]
            used = [weights[w] if w else None for w in node.weights]
            results = lower_op(writer, node.op, operands, used, node.attrs)
            for value, result in zip(node.outputs, results, strict=True):
                result.shape = list(value.shape)
                self._tensors[value.name] = result
        writer.scope = "border"
        outputs = [self._output(self._values[n]) for n in body.outputs]
        given = [*inputs, *weights.values()]
        return gs.Graph(writer.nodes, given, outputs, name=name, opset=OPSET, doc_string=body.text())

    def _input(self, value: Value) -> gs.Variable:
        """The border's tensor; what reads it gets the value without padding, in its own shape."""
        writer, shape = self._writer, border_shape(value, self._row_multiple)
        tensor = writer.variable(value.name, value.dtype, shape)
        writer.scope = "border"
        own = tensor
        if len(shape) > 1:
            elements = row_elements(value, 1)
            if elements < int(shape[1]):
                own = writer.columns(own, 0, elements)
            if len(value.shape) > 2:
                own = writer.op("Reshape", [own, writer.ints(0, *map(int, value.shape[1:]))])
            own.shape = list(value.shape) if own is not tensor else own.shape
        self._tensors[value.name] = own
        return tensor

    def _output(self, value: Value) -> gs.Variable:
        writer, shape = self._writer, border_shape(value, self._row_multiple)
        tensor, result = self._tensors[value.name], writer.variable(value.name, value.dtype, shape)
        if len(shape) > 1:
            if len(value.shape) > 2:
                tensor = writer.op("Reshape", [tensor, writer.ints(0, row_elements(value, 1))])
            if missing := int(shape[1]) - row_elements(value, 1):
                return writer.op("Pad", [tensor, writer.ints(0, 0, 0, missing)], output=result)
        return writer.op("Identity", [tensor], output=result)

    def _operand(self, operand: Operand) -> gs.Variable:
        """The tensor with a window's contents; equal windows are made once."""
        if operand not in self._windows:
            value = self._values[operand.value]
            tensor, row = self._tensors[value.name], tuple(map(int, value.shape[1:]))
            for step in _steps(operand, value):
                row = shape_after(step, row)
                tensor = self._step(step, tensor)
                tensor.shape = [value.shape[0], *row]
            self._windows[operand] = tensor
        return self._windows[operand]

    def _step(self, step: Step, tensor: gs.Variable) -> gs.Variable:
        writer = self._writer
        if isinstance(step, Reshape):  # 0 keeps the leading dimension, whatever it is
            return writer.op("Reshape", [tensor, writer.ints(0, *step.shape)])
        if isinstance(step, Slice):
            bounds = [writer.ints(n) for n in (step.start, step.stop, step.axis + 1)]
            return writer.op("Slice", [tensor, *bounds])
        order = [0, *(axis + 1 for axis in step.order)]
        return writer.op("Transpose", [tensor], {"perm": order})


def _steps(operand: Operand, value: Value) -> tuple[Step, ...]:
    if len(value.shape) == 1:
        return ()
    try:
        return operand_steps(operand, value)
    except ValueError as error:
        raise UnsupportedError(
            f"a dense region reads {operand}, which ONNX cannot express: {error}",
            hint="build with --tactics native",
        ) from None
