"""activation: elementwise function `kind` (silu, gelu, gelu_tanh, relu, tanh, sigmoid)."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("activation", inputs=("x",), attrs={"kind": str})
