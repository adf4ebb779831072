"""gated_activation: out = act(gate) * up, where x = gate | up.

x [..., 2 I] -> out [..., I]; act(gate) is rounded to x's dtype before the product.
`activation` is silu, gelu, gelu_tanh or relu.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("gated_activation", inputs=("x",), attrs={"activation": str})
