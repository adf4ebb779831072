"""rope_table: cosines and sines of the rotary embedding at the step's positions.

positions [...] int, inv_freq [rotary_dim / 2] float32 -> out [..., rotary_dim] of dtype
`dtype`: the cosines, then the sines, each times `scaling`; computed in float32.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "rope_table",
    inputs=("positions",),
    weights=("inv_freq",),
    attrs={"scaling": float, "dtype": str},
)
