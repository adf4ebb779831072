"""mul: a * b, both [..., D] of one shape and dtype."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("mul", inputs=("a", "b"))
