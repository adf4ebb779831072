"""norm_linear: a linear over the RMSNorm of its input, and the gated activation behind it if there is one.

x [..., K], norm_weight [K], weight [N, K], bias [N] (may be absent) -> out [..., N], or [..., N / 2]
with an activation. It equals rms_norm, linear and gated_activation one after the other, with their
attributes and their roundings; `activation` "" is none.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "norm_linear",
    inputs=("x",),
    weights=("norm_weight", "weight", "bias?"),
    attrs={"eps": float, "weight_offset": float, "cast_before_weight": bool, "activation": str},
    matrices=("weight",),
)
