"""scale: x * factor in float32, rounded to x's dtype."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("scale", inputs=("x",), attrs={"factor": float})
