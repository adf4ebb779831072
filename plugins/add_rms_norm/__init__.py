"""add_rms_norm: residual addition followed by rms_norm.

x, residual [..., D], weight [D] -> out = rms_norm(sum), sum = x + residual in x's dtype.
Attributes as in rms_norm.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "add_rms_norm",
    inputs=("x", "residual"),
    weights=("weight",),
    outputs=("out", "sum"),
    attrs={"eps": float, "weight_offset": float, "cast_before_weight": bool},
)
