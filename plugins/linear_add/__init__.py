"""linear_add: a linear and the residual that is added to it.

x [..., K], residual [..., N], weight [N, K], bias [N] (may be absent) -> out [..., N]. The product
(with its bias) is rounded to x's dtype before the sum.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("linear_add", inputs=("x", "residual"), weights=("weight", "bias?"), matrices=("weight",))
