"""Lower the fused FX graph to the IR.

The graph is interpreted on meta tensors with stand-in sizes for T and R. Views thereby get
their strides and offsets from torch itself; every other op becomes one IR node. What has no
place in the op vocabulary is listed all at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tapeout.compiler.graph import Graph, aten, custom_name
from tapeout.compiler.ir import Module, Node, Operand, Value, WeightType
from tapeout.compiler.passes.activations import activation_kind
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import AttrValue
from tapeout.plugins.registry import OPS
from tapeout.runtime.engine.program import STEP_INPUTS, Dim

# Stand-ins for T and R: primes that are no model's size; meta tensors take no memory.
_T, _R = 1_000_003, 1_000_033
_SYMBOLS = {_T: "T", _R: "R"}

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.transpose.int,
        aten.expand.default,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.select.int,
        aten.split_with_sizes.default,
        aten.split.Tensor,
        aten.chunk.default,
    }
)


@dataclass
class _Tensor:
    """A node's result: a meta tensor that is a view of a value's whole tensor."""

    value: Value
    meta: torch.Tensor


@dataclass
class _Lowering:
    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    weights: dict[str, WeightType] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)

    def emit(
        self, op: str, tensors: list[_Tensor], weights: list[str], attrs: dict[str, AttrValue], out: Any
    ) -> Any:
        """Append a node; `out` is the meta result (a tensor or a tuple of them)."""
        results = out if isinstance(out, (tuple, list)) else (out,)
        start = sum(len(n.outputs) for n in self.nodes)
        values = [
            Value(f"%{start + i}", _name(r.dtype), _symbolic(_without_batch(r).shape))
            for i, r in enumerate(results)
        ]
        inputs = tuple(self.operand(t) for t in tensors)
        self.nodes.append(Node(op, inputs, tuple(weights), tuple(values), attrs))
        made = [
            _Tensor(v, torch.empty(r.shape, dtype=r.dtype, device="meta"))
            for v, r in zip(values, results, strict=True)
        ]
        return made if isinstance(out, (tuple, list)) else made[0]

    def meta(self, argument: Any) -> Any:
        """A meta tensor for a result or a weight's name; other arguments as they are."""
        if isinstance(argument, _Tensor):
            return argument.meta
        if isinstance(argument, str) and argument in self.weights:
            weight = self.weights[argument]
            return torch.empty(weight.shape, dtype=getattr(torch, weight.dtype), device="meta")
        return argument

    def operand(self, tensor: _Tensor) -> Operand:
        meta = _without_batch(tensor.meta)
        shape = _symbolic(meta.shape)
        if shape[0] not in _SYMBOLS.values() or any(isinstance(d, str) for d in shape[1:]):
            raise UnsupportedError(
                f"value {tensor.value.name} is used with shape {shape}, whose rows do not lead"
            )
        return Operand(tensor.value.name, shape, tuple(meta.stride()), int(meta.storage_offset()))


def lower(graph: Graph) -> Module:
    """The graph as IR.

    Weights made by equal recipes (tied embeddings) become one.

    Raises:
        UnsupportedError: ops outside the vocabulary, all of them listed.
    """
    state = _Lowering(graph)
    first_of: dict[Any, str] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            _placeholder(state, node, first_of)
        elif node.op == "call_function":
            _call(state, node)
    if state.unsupported:
        raise UnsupportedError(
            "the model's graph holds ops that are not in the vocabulary:\n  "
            + "\n  ".join(state.unsupported),
            hint="see plugins/README.md for the ops there are",
        )
    (output,) = graph.graph.find_nodes(op="output")
    logits = state.operand(state.env[output.args[0][0]])
    used = {w for n in state.nodes for w in n.weights}
    weights = {name: type_ for name, type_ in state.weights.items() if name in used}
    return Module(tuple(state.inputs), weights, tuple(state.nodes), logits)


def _placeholder(state: _Lowering, node: fx.Node, first_of: dict[Any, str]) -> None:
    name = state.graph.weight_name(node)
    if name is not None:
        ref = state.graph.weights[name]
        state.env[node] = first_of.setdefault((ref.text(), ref.dtype), name)
        state.weights.setdefault(state.env[node], WeightType(ref.dtype, ref.shape))
    elif node.name in STEP_INPUTS:
        row = _R if node.name == "row_ids" else _T
        value = Value(node.name, "int32", (_SYMBOLS[row],))
        state.inputs.append(value)
        rank = len(node.meta["val"].shape)
        state.env[node] = _Tensor(value, torch.empty((1, row)[2 - rank :], dtype=torch.int64, device="meta"))
    else:
        state.env[node] = node.meta["val"]  # step tensors: no operands in the IR


def _call(state: _Lowering, node: fx.Node) -> None:
    if any(a not in state.env for a in node.all_input_nodes):
        return  # follows from an op that is listed already
    try:
        _lower_call(state, node)
    except Exception:
        if not state.unsupported:
            raise
        # What comes after an op that is listed already may fail for that reason alone.


def _lower_call(state: _Lowering, node: fx.Node) -> None:
    target = node.target
    if target is operator.getitem or target is aten.sym_size.int:
        source, index = (state.env[a] if isinstance(a, fx.Node) else a for a in node.args)
        state.env[node] = source[index] if target is operator.getitem else source.meta.shape[index]
    elif target in _VIEWS:
        state.env[node] = _view(state, node)
    elif (emitted := _emit(state, node)) is not None:
        state.env[node] = emitted
    else:
        state.unsupported.append(f"{target} (node {node.name})")
        # A stand-in for the result, so that unknown ops further down are listed in the same error.
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: state.meta(state.env[n]))
        assert callable(target)
        state.env[node] = state.emit("unknown", [], [], {}, target(*args, **kwargs))


def _view(state: _Lowering, node: fx.Node) -> Any:
    source, *rest = fx.map_arg(node.args, lambda n: state.env[n])
    target: Callable[..., Any] = node.target
    if target in {aten.view.default, aten.reshape.default}:
        target = aten.view.default
        try:
            target(source.meta, *rest)
        except RuntimeError:  # the window is not viewable in that shape: make it contiguous first
            source = state.emit("copy", [source], [], {}, source.meta.contiguous())
    result = target(source.meta, *rest)
    if isinstance(result, (tuple, list)):
        return [_Tensor(source.value, r) for r in result]
    return _Tensor(source.value, result)


def _emit(state: _Lowering, node: fx.Node) -> Any:
    """Append the IR node of a compute op; None when the vocabulary has none."""
    args = [state.env[a] if isinstance(a, fx.Node) else a for a in node.args]
    if (name := custom_name(node)) is not None:
        return _emit_custom(state, node, name, args)
    tensors = [a for a in args if isinstance(a, _Tensor)]
    if node.target is aten.linear.default:
        weights = [a for a in args[1:] if a is not None]
        shape = (*args[0].meta.shape[:-1], state.weights[args[1]].shape[0])
        out = torch.empty(shape, dtype=args[0].meta.dtype, device="meta")
        return state.emit("linear", [args[0]], [weights[0], weights[1] if len(weights) > 1 else ""], {}, out)
    if node.target is aten.embedding.default:
        weight = state.weights[args[0]]
        out = torch.empty(
            (*args[1].meta.shape, weight.shape[1]), dtype=getattr(torch, weight.dtype), device="meta"
        )
        return state.emit("embedding", [args[1]], [args[0]], {}, out)
    if (kind := activation_kind(node)) is not None:
        return state.emit("activation", tensors, [], {"kind": kind}, torch.empty_like(args[0].meta))
    if node.target in {aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor} and not node.kwargs:
        return _emit_arithmetic(state, node, args)
    return None


def _emit_arithmetic(state: _Lowering, node: fx.Node, args: list[Any]) -> Any:
    left, right = args
    if node.target is aten.mul.Tensor and (scaled := _by_weight(state, left, right)) is not None:
        return scaled
    if isinstance(left, _Tensor) and isinstance(right, _Tensor):
        if node.target is aten.div.Tensor:
            return None
        if left.meta.shape != right.meta.shape:
            left, right = _broadcast(state, left, right)
        op = "add" if node.target is aten.add.Tensor else "mul"
        return state.emit(op, [left, right], [], {}, torch.empty_like(left.meta))
    if isinstance(left, _Tensor) and isinstance(right, (int, float)) and node.target is not aten.add.Tensor:
        factor = float(right) if node.target is aten.mul.Tensor else 1.0 / right
        return state.emit("scale", [left], [], {"factor": factor}, torch.empty_like(left.meta))
    return None


def _by_weight(state: _Lowering, left: Any, right: Any) -> Any:
    """A product with a vector of the checkpoint, one number a column or one for all."""
    for x, weight in ((left, right), (right, left)):
        if isinstance(x, _Tensor) and isinstance(weight, str) and weight in state.weights:
            shape = state.weights[weight].shape
            if len(shape) == 1 and shape[0] in (1, x.meta.shape[-1]):
                return state.emit("mul_weight", [x], [weight], {}, torch.empty_like(x.meta))
    return None


def _broadcast(state: _Lowering, left: _Tensor, right: _Tensor) -> tuple[_Tensor, _Tensor]:
    """Operands of one shape; kernels want rows of consecutive elements, so a repeated element is copied."""
    shape = torch.broadcast_shapes(left.meta.shape, right.meta.shape)

    def full(operand: _Tensor) -> _Tensor:
        if operand.meta.shape == shape:
            return operand
        wide = operand.meta.expand(shape)
        copied: _Tensor = state.emit(
            "copy",
            [_Tensor(operand.value, wide)],
            [],
            {},
            torch.empty(shape, dtype=wide.dtype, device="meta"),
        )
        return copied

    return full(left), full(right)


def _emit_custom(state: _Lowering, node: fx.Node, name: str, args: list[Any]) -> Any:
    schema = OPS[name]
    count = len(schema.inputs)
    inputs, rest = args[:count], args[count:]
    weights = ["" if w is None else w for w in rest[: len(schema.weights)]]
    attrs = dict(zip(schema.attrs, rest[len(schema.weights) + len(schema.step_inputs) :], strict=True))

    metas = [state.meta(a) for a in args]
    steps = slice(count + len(schema.weights), count + len(schema.weights) + len(schema.step_inputs))
    metas[steps] = [
        torch.empty([int(s) for s in v.shape], dtype=v.dtype, device="meta") for v in metas[steps]
    ]
    assert callable(node.target)
    return state.emit(name, inputs, weights, attrs, node.target(*metas))


def _without_batch(tensor: torch.Tensor) -> torch.Tensor:
    """Drop the leading batch dimension of 1 that traced tensors carry in front of their rows."""
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] in _SYMBOLS:
        return tensor[0]
    return tensor


def _symbolic(shape: torch.Size) -> tuple[Dim, ...]:
    return tuple(_SYMBOLS.get(s, s) for s in shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
