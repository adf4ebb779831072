"""linear: out = x @ weight.T + bias.

x [..., K], weight [N, K], bias [N] (may be absent) -> out [..., N], all of one dtype.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("linear", inputs=("x",), weights=("weight", "bias?"), matrices=("weight",))
