"""Regions by their ops' torch references, and their ONNX models in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from tapeout.compiler.ir import Module, Node, Operand, Value, WeightType, contiguous_strides, whole
from tapeout.compiler.plan import row_elements
from tapeout.compiler.regions import Body
from tapeout.plugins.example import torch_dtype
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import OPS

Tensors = dict[str, torch.Tensor]
#: The fixture `lowered`: (model type, dtype) to the module of a tiny model.
Lowered = Callable[[str, str], Module]


def example_tensors(body: Body, rows: Mapping[str, int], seed: int = 0) -> Tensors:
    """Inputs and weights of a body; ids name what is there, products keep the scale of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    limits = _id_limits(body, rows)
    tensors: Tensors = {}
    for value in body.inputs:
        shape = _shape(value, rows)
        if value.dtype == "int32":
            limit = limits.get(value.name, 300)
            tensors[value.name] = torch.randint(0, limit, shape, generator=generator, dtype=torch.int32)
        else:
            tensors[value.name] = torch.randn(shape, generator=generator).to(torch_dtype(value.dtype))
    for name, kind in body.weights.items():
        made = torch.randn(kind.shape, generator=generator)
        if len(kind.shape) > 1:
            made /= kind.shape[-1] ** 0.5
        tensors[name] = made.to(torch_dtype(kind.dtype))
    return tensors


def _id_limits(body: Body, rows: Mapping[str, int]) -> dict[str, int]:
    limits = {}
    for node in body.nodes:
        if node.op == "embedding":
            limits[node.inputs[0].value] = body.weights[node.weights[0]].shape[0]
        if node.op == "select_rows":
            limits[node.inputs[1].value] = rows[str(node.inputs[0].shape[0])]
    return limits


def _shape(value: Value | Operand, rows: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(rows[d] if isinstance(d, str) else d for d in value.shape)


def run_reference(body: Body, tensors: Tensors, rows: Mapping[str, int]) -> Tensors:
    """The body's outputs, node by node."""
    values = body.values()
    held = dict(tensors)

    def window(operand: Operand) -> torch.Tensor:
        whole_value = held[operand.value].contiguous()
        if operand == whole(values[operand.value]):
            return whole_value
        return whole_value.as_strided(_shape(operand, rows), operand.strides, operand.offset)

    for node in body.nodes:
        inputs = [window(operand) for operand in node.inputs]
        weights = [held[w] if w else None for w in node.weights]
        outputs = bind_reference(node.op, inputs, weights, node.attrs)()
        for value, output in zip(node.outputs, outputs, strict=True):
            held[value.name] = output.reshape(_shape(value, rows))
    return {name: held[name] for name in body.outputs}


def at_border(tensor: torch.Tensor, value: Value | None, row_multiple: int) -> np.ndarray:
    """A tensor as it crosses a border (weights: value None), bfloat16 as float32; padding is NaN or -1."""
    if value is not None and len(value.shape) > 1:
        padded = row_elements(value, row_multiple)
        flat = tensor.reshape(tensor.shape[0], -1)
        fill = -1 if not tensor.is_floating_point() else float("nan")
        tensor = torch.full((flat.shape[0], padded), fill, dtype=flat.dtype)
        tensor[:, : flat.shape[1]] = flat
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def feed_of(body: Body, tensors: Tensors, row_multiple: int) -> dict[str, np.ndarray]:
    """What a region's model is fed."""
    values = body.values()
    return {name: at_border(tensor, values.get(name), row_multiple) for name, tensor in tensors.items()}


def expected_of(body: Body, outputs: Tensors) -> dict[str, np.ndarray]:
    """Outputs as matrices without padding, in float32."""
    values = body.values()
    return {
        name: tensor.float().reshape(tensor.shape[0], -1).numpy()[:, : row_elements(values[name], 1)]
        for name, tensor in outputs.items()
    }


class ReferenceRunner(BaseRunner):
    """The torch reference as a runner of polygraphy's."""

    def __init__(self, body: Body, tensors: Tensors, rows: Mapping[str, int]) -> None:
        super().__init__("torch reference")
        self._body, self._tensors, self._rows = body, tensors, rows

    def get_input_metadata_impl(self) -> TensorMetadata:
        return TensorMetadata()

    def infer_impl(self, feed_dict: Any) -> dict[str, np.ndarray]:
        self.inference_time = 0.0
        return expected_of(self._body, run_reference(self._body, self._tensors, self._rows))


def for_onnx_runtime(model: onnx.ModelProto, body: Body) -> onnx.ModelProto:
    """The same graph with float32 borders without padding, for a runtime that has no bfloat16 arithmetic.

    Every op on bfloat16 computes in float32 and rounds its result to bfloat16: what the op means. Other ops
    stay as they are.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph, narrow, wide = model.graph, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    types = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    for info in onnx.shape_inference.infer_shapes(model).graph.value_info:
        types[info.name] = info.type.tensor_type.elem_type
    types |= {o.name: o.type.tensor_type.elem_type for o in graph.output}
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(graph.node):
        if node.op_type != "Cast":
            for place, name in enumerate(node.input):
                if types.get(name) == narrow:
                    nodes.append(helper.make_node("Cast", [name], [f"{name}/wide{number}.{place}"], to=wide))
                    node.input[place] = f"{name}/wide{number}.{place}"
        nodes.append(node)
        if node.op_type != "Cast":
            for place, name in enumerate(node.output):
                if types.get(name) == narrow:
                    node.output[place] = f"{name}/wide"
                    nodes.append(helper.make_node("Cast", [f"{name}/wide"], [name], to=narrow))
    first, last = [], []
    for info in (*graph.input, *graph.output):
        if info.type.tensor_type.elem_type == narrow:
            info.type.tensor_type.elem_type = wide
    for info in graph.input:
        if types[info.name] == narrow:
            inner = f"{info.name}/narrow"
            first.append(helper.make_node("Cast", [info.name], [inner], to=narrow))
            for node in nodes:
                node.input[:] = [inner if name == info.name else name for name in node.input]
    values = body.values()
    for info in graph.output:
        inner, columns = f"{info.name}/padded", row_elements(values[info.name], 1)
        for node in nodes:
            node.output[:] = [inner if name == info.name else name for name in node.output]
            node.input[:] = [inner if name == info.name else name for name in node.input]
        cast = f"{info.name}/float"
        last.append(helper.make_node("Cast", [inner], [cast], to=wide))
        bounds = []
        for text, number in (("start", 0), ("stop", columns), ("axis", 1)):
            name = f"{info.name}/{text}"
            graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [1], [number]))
            bounds.append(name)
        last.append(helper.make_node("Slice", [cast, *bounds], [info.name]))
        info.type.tensor_type.elem_type = wide
        info.type.tensor_type.shape.dim[1].dim_value = columns
    del graph.node[:]
    graph.node.extend([*first, *nodes, *last])
    del graph.value_info[:]
    onnx.checker.check_model(model)
    return model


def single_op(op: str, signature: Any) -> Body:
    """A body of one node, from an op's signature."""
    schema = OPS[op]
    inputs = tuple(Value(f"x{i}", t.dtype, t.shape) for i, t in enumerate(signature.inputs))
    weights = {
        f"w{i}": WeightType(t.dtype, tuple(map(int, t.shape))) for i, t in enumerate(signature.weights)
    }
    outputs = tuple(Value(f"y{i}", t.dtype, t.shape) for i, t in enumerate(signature.outputs))
    placed = schema.place_weights(list(weights), signature.attrs)
    node = Node(
        op,
        tuple(Operand(v.name, v.shape, contiguous_strides(v.shape)) for v in inputs),
        tuple(w or "" for w in placed),
        outputs,
        signature.attrs,
    )
    return Body(inputs, weights, (node,), tuple(v.name for v in outputs))
