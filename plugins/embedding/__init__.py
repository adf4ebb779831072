"""embedding: rows of a table picked by token id.

token_ids [...] int, weight [V, H] -> out [..., H] in the weight's dtype.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("embedding", inputs=("token_ids",), weights=("weight",))
