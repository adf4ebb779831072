"""linear_int8: matrix product in int8 with dynamic activation scales ("int8-dynamic").

x [..., K] float, weight int8 [N, K], scale float32 [N], bias [N] (may be absent)
-> out [..., N] in x's dtype. Exactly:

1. s = max|x_row| / 127 in float32; q = round_half_even(x_row / s) as int8 (all 0 when s is 0);
   a row that holds NaN or infinity gives an all-NaN row
2. acc = q . weight_row in int32
3. out = float(acc) * s * scale (+ bias) in float32, then cast to x's dtype
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("linear_int8", inputs=("x",), weights=("weight", "scale", "bias?"))
