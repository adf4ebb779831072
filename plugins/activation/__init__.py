"""activation: elementwise function `kind`: silu, gelu, gelu_tanh, relu, tanh, sigmoid, relu2 (relu
squared), quick_gelu (x * sigmoid(1.702 x)), softplus (log(1 + exp(x)); x itself above 20)."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("activation", inputs=("x",), attrs={"kind": str})
