"""Which IR ops are exactly one op of the ONNX standard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tapeout.compiler.ir import Module, Node
from tapeout.plugins.op import AttrValue

#: Older than what `onnx` knows, so that more tools read the file; has all that is used here.
OPSET = 23


@dataclass(frozen=True)
class StandardOp:
    """An op of the ONNX standard with the arguments of an IR node.

    Attributes:
        arguments: the order of the node's inputs followed by its weights; absent weights drop out.
        constants: float32 scalars that follow as further arguments.
    """

    op_type: str
    arguments: tuple[int, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)
    constants: tuple[float, ...] = ()


def standard_op(node: Node, module: Module) -> StandardOp | None:
    """The standard op that computes what `node` does, for its dtypes, ranks and attributes; else None."""
    find = _FINDERS.get(node.op)
    return find(node, module) if find else None


def _linear(node: Node, module: Module) -> StandardOp | None:
    # Gemm takes matrices only; MatMul would need the transposed weight, whose bytes the engine does not hold.
    if len(node.inputs[0].shape) != 2:
        return None
    return StandardOp("Gemm", (0, 1, 2), {"transB": 1})


def _rms_norm(node: Node, module: Module) -> StandardOp | None:
    x, weight = module.values()[node.inputs[0].value], module.weights[node.weights[0]]
    # RMSNormalization rounds to x's dtype before it multiplies; in float32 there is nothing to round.
    as_standard = node.attrs["cast_before_weight"] or x.dtype == "float32"
    if not as_standard or node.attrs["weight_offset"] != 0 or x.dtype != weight.dtype:
        return None
    return StandardOp("RMSNormalization", (0, 1), {"axis": -1, "epsilon": node.attrs["eps"], "stash_type": 1})


def _scale(node: Node, module: Module) -> StandardOp | None:
    # In other dtypes the product is made in float32 and rounded once, which takes three nodes.
    if module.values()[node.inputs[0].value].dtype != "float32":
        return None
    return StandardOp("Mul", (0,), constants=(float(node.attrs["factor"]),))


def _activation(node: Node, module: Module) -> StandardOp | None:
    kind = str(node.attrs["kind"])
    if kind in {"gelu", "gelu_tanh"}:
        return StandardOp("Gelu", (0,), {"approximate": "tanh" if kind == "gelu_tanh" else "none"})
    names = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}
    return StandardOp(names[kind], (0,)) if kind in names else None  # silu is Swish from opset 24 on


def _always(op: StandardOp) -> Callable[[Node, Module], StandardOp]:
    return lambda node, module: op


_FINDERS: Mapping[str, Callable[[Node, Module], StandardOp | None]] = MappingProxyType(
    {
        "activation": _activation,
        "add": _always(StandardOp("Add", (0, 1))),
        "copy": _always(StandardOp("Identity", (0,))),
        "embedding": _always(StandardOp("Gather", (1, 0), {"axis": 0})),
        "linear": _linear,
        "mul": _always(StandardOp("Mul", (0, 1))),
        "rms_norm": _rms_norm,
        "scale": _scale,
        "select_rows": _always(StandardOp("Gather", (0, 1), {"axis": 0})),
    }
)
