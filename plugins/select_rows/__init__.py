"""select_rows: x [..., T, H], row_ids [R] int -> out [..., R, H], the rows row_ids of x."""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("select_rows", inputs=("x", "row_ids"))
