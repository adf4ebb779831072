"""add: a + b, both [..., D] of one shape and dtype."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("add", inputs=("a", "b"))
