"""layer_norm: layer normalisation over the last dimension.

x [..., D], weight [D], bias [D] (may be absent) -> out [..., D] in x's dtype. Mean, variance and the
products are float32; one rounding at the end, as torch's layer_norm does.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("layer_norm", inputs=("x",), weights=("weight", "bias?"), attrs={"eps": float})
