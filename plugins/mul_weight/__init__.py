"""mul_weight: out = x * weight, rounded once.

x [..., D], weight [D] or [1] -> out [..., D].
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("mul_weight", inputs=("x",), weights=("weight",))
