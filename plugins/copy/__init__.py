"""copy: a contiguous copy of a strided view."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("copy", inputs=("x",))
