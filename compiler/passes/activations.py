"""Which ATen calls are activation functions, and what the op vocabulary calls them."""

from __future__ import annotations

from torch import fx

from tapeout.compiler.graph import aten, custom_name

_KINDS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
}


def activation_kind(node: fx.Node) -> str | None:
    """The op's `kind` (`silu`, `gelu_tanh`, ...); None for other nodes."""
    if node.op != "call_function":
        return None
    if custom_name(node) == "activation":
        return str(node.args[1])
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return _KINDS.get(node.target)
