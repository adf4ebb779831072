"""Dense ops of the IR as ops of the ONNX standard: the meaning of each op's torch reference, spelled out.

Roundings are part of an op's meaning, so every one of the reference is a Cast here: what it computes in
float32 is float32, what it rounds between two operations is rounded. TensorRT keeps them, because segments
are strongly typed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import AttrValue

#: Newest that TensorRT 10.13 and ONNX Runtime read alike; the first with Gelu.
OPSET = 20
ONNX_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "float32": onnx.TensorProto.FLOAT,
        "float16": onnx.TensorProto.FLOAT16,
        "bfloat16": onnx.TensorProto.BFLOAT16,
        "int32": onnx.TensorProto.INT32,
    }
)
_WIDE = "float32"
_QUICK_GELU = 1.702


class Writer:
    """Collects ONNX nodes. Tensors are variables of onnx-graphsurgeon; `dtype` knows the IR's names."""

    def __init__(self) -> None:
        self.nodes: list[gs.Node] = []
        self.scope = ""  # in front of the names of nodes and tensors: which op of the region they belong to
        self._dtypes: dict[str, str] = {}
        self._constants: dict[tuple[str, str], gs.Constant] = {}
        self._count = 0

    def variable(self, name: str, dtype: str, shape: Sequence[int | str] | None = None) -> gs.Variable:
        """A tensor of the graph's border, or one of a node."""
        self._dtypes[name] = dtype
        return gs.Variable(name, ONNX_TYPES[dtype], None if shape is None else list(shape))

    def dtype(self, tensor: gs.Variable) -> str:
        return self._dtypes[tensor.name]

    def op(
        self,
        op_type: str,
        inputs: Sequence[gs.Tensor],
        attrs: Mapping[str, object] | None = None,
        *,
        dtype: str | None = None,
        output: gs.Variable | None = None,
    ) -> gs.Variable:
        """Append a node with one output, of its first input's dtype unless another is named."""
        self._count += 1
        name = f"{self.scope}/{op_type}.{self._count}"
        result = output if output is not None else self.variable(name, dtype or self.dtype(inputs[0]))
        self.nodes.append(gs.Node(op_type, name, dict(attrs or {}), list(inputs), [result]))
        return result

    def cast(self, x: gs.Variable, dtype: str) -> gs.Variable:
        if self.dtype(x) == dtype:
            return x
        return self.op("Cast", [x], {"to": ONNX_TYPES[dtype]}, dtype=dtype)

    def scalar(self, value: float) -> gs.Constant:
        """A float32 constant."""
        return self._constant(np.array(value, np.float32))

    def ints(self, *values: int) -> gs.Constant:
        return self._constant(np.array(values, np.int64))

    def ints32(self, *values: int) -> gs.Constant:
        return self._constant(np.array(values, np.int32))

    def columns(self, x: gs.Variable, start: int, stop: int, step: int = 1) -> gs.Variable:
        """Elements `[start, stop)` of the last dimension."""
        bounds = [self.ints(n) for n in (start, stop, -1, step)]
        return self.op("Slice", [x, *bounds])

    def _constant(self, values: np.ndarray) -> gs.Constant:
        key = (str(values.dtype), repr(values.tolist()))
        if key not in self._constants:
            self._constants[key] = gs.Constant(f"{key[0]}{key[1]}", values)
            self._dtypes[self._constants[key].name] = key[0]
        return self._constants[key]


Tensors = list[gs.Variable]
Weights = list[gs.Variable | None]
Lowering = Callable[[Writer, Tensors, Weights, Mapping[str, AttrValue]], Tensors]


def lower_op(
    writer: Writer, op: str, inputs: Tensors, weights: Weights, attrs: Mapping[str, AttrValue]
) -> Tensors:
    """Append one op of the IR; its results.

    Args:
        inputs: operands in their windows' shapes, [T, ...] or [R, ...].
        weights: in the schema's order, None for an absent one.

    Raises UnsupportedError for an activation that has no form here.
    """
    return LOWERINGS[op](writer, inputs, weights, attrs)


def _linear(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [_product(g, x[0], w[0], w[1], len(x[0].shape))]


def _product(
    g: Writer, x: gs.Variable, weight: gs.Variable | None, bias: gs.Variable | None, rank: int
) -> gs.Variable:
    """x @ weight^T + bias. Gemm takes matrices only; heads are multiplied by MatMul."""
    assert weight is not None
    if rank == 2:
        return g.op("Gemm", [x, weight, *([bias] if bias is not None else [])], {"transB": 1})
    product = g.op("MatMul", [x, g.op("Transpose", [weight], {"perm": [1, 0]})])
    return product if bias is None else g.op("Add", [product, bias])


def _linear_add(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [g.op("Add", [_product(g, x[0], w[0], w[1], len(x[0].shape)), x[1]])]


def _norm_linear(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    product = _product(g, _rms(g, x[0], w[0], attrs), w[1], w[2], len(x[0].shape))
    kind = str(attrs["activation"])
    return [_gate(g, product, w[1], kind) if kind else product]


def _gate(g: Writer, both: gs.Variable, weight: gs.Variable | None, kind: str) -> gs.Variable:
    """activation(gate) * up, of a product whose columns are gates, then ups."""
    assert weight is not None
    return _gated(g, both, int(weight.shape[0]), kind)


def _gated(g: Writer, both: gs.Variable, columns: int, kind: str) -> gs.Variable:
    gate, up = g.columns(both, 0, columns // 2), g.columns(both, columns // 2, columns)
    return g.op("Mul", [_activate(g, gate, kind), up])


def _gated_activation(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [_gated(g, x[0], int(x[0].shape[-1]), str(attrs["activation"]))]


def _activation(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [_activate(g, x[0], str(attrs["kind"]))]


def _activate(g: Writer, x: gs.Variable, kind: str) -> gs.Variable:
    """As torch: each function rounds once, except those that the reference composes."""
    dtype = g.dtype(x)
    wide = g.cast(x, _WIDE)

    def rounded(value: gs.Variable) -> gs.Variable:
        return g.cast(g.cast(value, dtype), _WIDE)

    if kind == "silu":
        wide = g.op("Mul", [wide, g.op("Sigmoid", [wide])])
    elif kind in {"gelu", "gelu_tanh"}:
        wide = g.op("Gelu", [wide], {"approximate": "tanh" if kind == "gelu_tanh" else "none"})
    elif kind in _SINGLE:
        wide = g.op(_SINGLE[kind], [wide])
    elif kind == "relu2":
        positive = g.op("Relu", [wide])
        wide = g.op("Mul", [positive, positive])
    elif kind == "quick_gelu":
        slope = rounded(g.op("Mul", [wide, g.scalar(_QUICK_GELU)]))
        wide = g.op("Mul", [wide, rounded(g.op("Sigmoid", [slope]))])
    else:
        raise UnsupportedError(
            f"activation {kind!r} has no form in TensorRT segments", hint="build with --tactics native"
        )
    return g.cast(wide, dtype)


_SINGLE = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid", "softplus": "Softplus"}


def _rms_norm(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [_rms(g, x[0], w[0], attrs)]


def _add_rms_norm(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    total = g.op("Add", [x[0], x[1]])
    return [_rms(g, total, w[0], attrs), total]


def _rms(
    g: Writer, x: gs.Variable, weight: gs.Variable | None, attrs: Mapping[str, AttrValue]
) -> gs.Variable:
    assert weight is not None
    dtype, offset = g.dtype(x), float(attrs["weight_offset"])
    wide = g.cast(x, _WIDE)
    normed = g.op("Mul", [wide, _inverse_root(g, g.op("Mul", [wide, wide]), float(attrs["eps"]))])
    if attrs["cast_before_weight"]:
        factor = weight
        if offset:
            shifted = g.op("Add", [g.cast(weight, _WIDE), g.scalar(offset)])
            factor = g.cast(shifted, g.dtype(weight))
        return g.op("Mul", [g.cast(normed, dtype), g.cast(factor, dtype)])
    factor = g.cast(weight, _WIDE)
    if offset:
        factor = g.op("Add", [factor, g.scalar(offset)])
    return g.cast(g.op("Mul", [normed, factor]), dtype)


def _layer_norm(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    weight, bias = w
    assert weight is not None
    wide = g.cast(x[0], _WIDE)
    wide = g.op("Sub", [wide, _mean(g, wide)])
    scale = _inverse_root(g, g.op("Mul", [wide, wide]), float(attrs["eps"]))
    normed = g.op("Mul", [g.op("Mul", [wide, scale]), g.cast(weight, _WIDE)])
    if bias is not None:
        normed = g.op("Add", [normed, g.cast(bias, _WIDE)])
    return [g.cast(normed, g.dtype(x[0]))]


def _mean(g: Writer, x: gs.Variable) -> gs.Variable:
    return g.op("ReduceMean", [x, g.ints(-1)], {"keepdims": 1})


def _inverse_root(g: Writer, squares: gs.Variable, eps: float) -> gs.Variable:
    """1 / sqrt(mean + eps)."""
    return g.op("Reciprocal", [g.op("Sqrt", [g.op("Add", [_mean(g, squares), g.scalar(eps)])])])


def _binary(op_type: str) -> Lowering:
    return lambda g, x, w, attrs: [g.op(op_type, [x[0], x[1]])]


def _mul_weight(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    assert w[0] is not None
    product = g.op("Mul", [g.cast(x[0], _WIDE), g.cast(w[0], _WIDE)])
    return [g.cast(product, g.dtype(x[0]))]


def _scale(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    product = g.op("Mul", [g.cast(x[0], _WIDE), g.scalar(float(attrs["factor"]))])
    return [g.cast(product, g.dtype(x[0]))]


def _copy(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    return [g.op("Identity", [x[0]])]


def _embedding(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    """Padding rows of a bucket hold stale ids, and nothing outside of the table may be read."""
    weight = w[0]
    assert weight is not None
    known = g.op("Min", [g.op("Max", [x[0], g.ints32(0)]), g.ints32(int(weight.shape[0]) - 1)])
    return [g.op("Gather", [weight, known], {"axis": 0})]


def _select_rows(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    """Padding rows ask for row 0 (replay.py sees to it): a bound here would need the shape on the device."""
    return [g.op("Gather", [x[0], x[1]], {"axis": 0})]


def _rope_table(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    assert w[0] is not None
    positions = g.op("Unsqueeze", [g.cast(x[0], _WIDE), g.ints(-1)])
    angles = g.op("Mul", [positions, g.cast(w[0], _WIDE)])
    both = g.op("Concat", [g.op("Cos", [angles]), g.op("Sin", [angles])], {"axis": -1})
    return [g.cast(g.op("Mul", [both, g.scalar(float(attrs["scaling"]))]), str(attrs["dtype"]))]


def _rope(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    head, table = x
    rotary, size = int(table.shape[-1]), int(head.shape[-1])
    half = rotary // 2
    cos, sin = (
        g.op("Unsqueeze", [g.cast(g.columns(table, at, at + half), g.dtype(head)), g.ints(-2)])
        for at in (0, half)
    )
    if attrs["interleaved"]:
        first, second = g.columns(head, 0, rotary, 2), g.columns(head, 1, rotary, 2)
    else:
        first, second = g.columns(head, 0, half), g.columns(head, half, rotary)
    turned = [
        g.op("Add", [g.op("Mul", [first, cos]), g.op("Mul", [g.op("Neg", [second]), sin])]),
        g.op("Add", [g.op("Mul", [second, cos]), g.op("Mul", [first, sin])]),
    ]
    if attrs["interleaved"]:
        pairs = g.op("Concat", [g.op("Unsqueeze", [t, g.ints(-1)]) for t in turned], {"axis": -1})
        heads = [int(n) for n in head.shape[1:-1]]
        turned = [g.op("Reshape", [pairs, g.ints(0, *heads, rotary)])]
    passed = [g.columns(head, rotary, size)] if rotary < size else []
    return [g.op("Concat", [*turned, *passed], {"axis": -1})]


def _xielu(g: Writer, x: Tensors, w: Weights, attrs: Mapping[str, AttrValue]) -> Tensors:
    wide = g.cast(x[0], _WIDE)
    alpha_p, alpha_n, slope, eps = (g.cast(t, _WIDE) for t in w if t is not None)
    above = g.op("Mul", [g.op("Mul", [g.op("Softplus", [alpha_p]), wide]), wide])
    clipped = g.op("Min", [wide, eps])
    # expm1(z) = tanh(z / 2) * (exp(z) + 1): exact near zero, where exp(z) - 1 is not.
    tanh = g.op("Tanh", [g.op("Mul", [clipped, g.scalar(0.5)])])
    expm1 = g.op("Mul", [tanh, g.op("Add", [g.op("Exp", [clipped]), g.scalar(1.0)])])
    factor = g.op("Add", [slope, g.op("Softplus", [alpha_n])])
    below = g.op("Mul", [factor, g.op("Sub", [expm1, wide])])
    positive = g.op("Greater", [wide, g.scalar(0.0)])
    chosen = g.op("Where", [positive, above, below], dtype=_WIDE)
    return [g.cast(g.op("Add", [chosen, g.op("Mul", [slope, wide])]), g.dtype(x[0]))]


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        "activation": _activation,
        "add": _binary("Add"),
        "add_rms_norm": _add_rms_norm,
        "copy": _copy,
        "embedding": _embedding,
        "gated_activation": _gated_activation,
        "layer_norm": _layer_norm,
        "linear": _linear,
        "linear_add": _linear_add,
        "mul": _binary("Mul"),
        "mul_weight": _mul_weight,
        "norm_linear": _norm_linear,
        "rms_norm": _rms_norm,
        "rope": _rope,
        "rope_table": _rope_table,
        "scale": _scale,
        "select_rows": _select_rows,
        "xielu": _xielu,
    }
)
