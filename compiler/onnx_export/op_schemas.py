"""The op vocabulary as ONNX schemas of the domain `tapeout`.

Everything comes from `plugins/`: arguments and attributes from the op's schema, the text from the docstring
of its folder, types and shapes of results from its torch reference. A new op needs nothing here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
from onnx import defs, helper
from onnx.defs import OpSchema as OnnxSchema

from tapeout.plugins.op import OpSchema
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS, register_torch_ops

if TYPE_CHECKING:
    import torch

DOMAIN, DOMAIN_VERSION = "tapeout", 1

#: Step tensors an op changes in place. In ONNX such an op also returns the changed tensor.
UPDATED_STEP_INPUTS = ("kv_pool",)

#: dtype names of engines to ONNX element types.
ELEMENT_TYPES = {
    "bool": onnx.TensorProto.BOOL,
    "uint8": onnx.TensorProto.UINT8,
    "int8": onnx.TensorProto.INT8,
    "int16": onnx.TensorProto.INT16,
    "int32": onnx.TensorProto.INT32,
    "int64": onnx.TensorProto.INT64,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float32": onnx.TensorProto.FLOAT,
    "float64": onnx.TensorProto.DOUBLE,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "float8_e5m2": onnx.TensorProto.FLOAT8E5M2,
}
_DTYPES = {code: name for name, code in ELEMENT_TYPES.items()}
_ATTRIBUTE_TYPES = {
    int: OnnxSchema.AttrType.INT,
    bool: OnnxSchema.AttrType.INT,
    float: OnnxSchema.AttrType.FLOAT,
    str: OnnxSchema.AttrType.STRING,
}
# Sizes that stand for symbols while shapes are inferred, one for each: larger than any model's, and two of
# them in one shape still make a size torch can count.
_FIRST_STAND_IN = 1 << 30


def updated_outputs(schema: OpSchema) -> tuple[str, ...]:
    """Step tensors the op changes, in the order in which they follow its outputs."""
    return tuple(name for name in schema.step_inputs if name in UPDATED_STEP_INPUTS)


def register_op_schemas() -> None:
    """Make ONNX's checker and shape inference know every op; may be called again."""
    for name in sorted(set(OPS) - TRACE_ONLY_OPS):
        if not defs.has(name, domain=DOMAIN):
            defs.register_schema(_onnx_schema(OPS[name]))


def _onnx_schema(schema: OpSchema) -> OnnxSchema:
    inputs = (*schema.inputs, *schema.weights, *schema.step_inputs)
    outputs = (*schema.outputs, *(f"{name}_out" for name in updated_outputs(schema)))
    arguments = (*inputs, *outputs)
    registered = OnnxSchema(
        schema.name,
        DOMAIN,
        DOMAIN_VERSION,
        doc=importlib.import_module(f"tapeout.plugins.{schema.name}").__doc__ or "",
        inputs=[_parameter(name) for name in inputs],
        outputs=[_parameter(name) for name in outputs],
        type_constraints=[(_variable(name), _tensor_types(), f"type of {name}") for name in arguments],
        attributes=[
            OnnxSchema.Attribute(name, _ATTRIBUTE_TYPES[kind], kind.__name__)
            for name, kind in schema.attrs.items()
        ],
    )
    registered.set_type_and_shape_inference_function(_inference(schema))
    return registered


def _parameter(name: str) -> OnnxSchema.FormalParameter:
    option = OnnxSchema.FormalParameterOption
    return OnnxSchema.FormalParameter(
        name.rstrip("?"),
        _variable(name),
        param_option=option.Optional if name.endswith("?") else option.Single,
    )


def _variable(name: str) -> str:
    """Each argument has a type of its own: a projection has int8 weights and float32 scales."""
    return f"T_{name.rstrip('?')}"


def _tensor_types() -> list[str]:
    return [f"tensor({onnx.TensorProto.DataType.Name(code).lower()})" for code in _DTYPES]


def _inference(schema: OpSchema) -> Callable[[Any], None]:
    """Runs the op's torch reference on tensors without data, symbols replaced by huge sizes."""

    def infer(context: Any) -> None:
        names = [*schema.inputs, *schema.weights, *schema.step_inputs]
        types = [
            context.get_input_type(i) if i < context.get_num_inputs() and context.has_input(i) else None
            for i in range(len(names))
        ]
        symbols: dict[str, int] = {}
        tensors = [None if t is None else _meta_tensor(t.tensor_type, symbols) for t in types]
        if any(
            tensor is None and not name.endswith("?") for name, tensor in zip(names, tensors, strict=True)
        ):
            return  # an argument's shape is unknown: so are the results'
        results = _run(schema, tensors, [context.get_attribute(name) for name in schema.attrs])
        for i, result in enumerate(results):
            context.set_output_type(i, _type_of(result, symbols))
        for i, name in enumerate(updated_outputs(schema), start=len(results)):
            context.set_output_type(i, types[names.index(name)])

    return infer


def _run(schema: OpSchema, tensors: Sequence[Any], attributes: Sequence[onnx.AttributeProto]) -> Any:
    import torch

    register_torch_ops()
    values = [helper.get_attribute_value(a) for a in attributes]
    attrs = [
        v.decode() if isinstance(v, bytes) else kind(v)
        for v, kind in zip(values, schema.attrs.values(), strict=True)
    ]
    result = getattr(torch.ops.tapeout, schema.name)(*tensors, *attrs)
    return result if isinstance(result, tuple) else (result,)


def _meta_tensor(kind: Any, symbols: dict[str, int]) -> torch.Tensor | None:
    import torch

    if not kind.HasField("shape") or kind.elem_type not in _DTYPES:
        return None
    sizes = []
    for dim in kind.shape.dim:
        if dim.HasField("dim_value"):
            sizes.append(dim.dim_value)
        elif dim.HasField("dim_param"):
            sizes.append(symbols.setdefault(dim.dim_param, _FIRST_STAND_IN + len(symbols)))
        else:
            return None
    return torch.empty(sizes, dtype=getattr(torch, _DTYPES[kind.elem_type]), device="meta")


def _type_of(tensor: torch.Tensor, symbols: dict[str, int]) -> onnx.TypeProto:
    names = {size: name for name, size in symbols.items()}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return helper.make_tensor_type_proto(ELEMENT_TYPES[dtype], [names.get(s, s) for s in tensor.shape])
