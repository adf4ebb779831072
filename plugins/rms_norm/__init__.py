"""rms_norm: root mean square normalisation over the last dimension.

x [..., D], weight [D] -> out [..., D] in x's dtype. The mean and the product with rsqrt are
float32. `cast_before_weight` (Llama): cast to x's dtype, then multiply by the weight;
otherwise (Gemma): multiply by `weight_offset + weight` in float32, then cast.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "rms_norm",
    inputs=("x",),
    weights=("weight",),
    attrs={"eps": float, "weight_offset": float, "cast_before_weight": bool},
)
