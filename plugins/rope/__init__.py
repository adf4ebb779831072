"""rope: rotary position embedding of every head.

x [..., H, D], table [..., rotary_dim] (see rope_table) -> out [..., H, D]. The first
rotary_dim elements of a head are rotated, the others pass through. Not interleaved: element
i pairs with i + rotary_dim / 2; interleaved: 2i pairs with 2i + 1. Rounds to x's dtype after
each operation of x * cos + rotate_half(x) * sin, as Hugging Face models do.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("rope", inputs=("x", "table"), attrs={"interleaved": bool})
