"""causal_mask: what a model adds to its scores, so that a query sees no later key.

positions [1, T] int -> out [1, 1, T, T] of dtype `dtype`: 0 where the query may see the key, the lowest
number of the type elsewhere. `window` as in attention. Exists while a model is traced whose attention is
written out; a pass recognizes it there.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("causal_mask", inputs=("positions",), attrs={"window": int, "dtype": str})
