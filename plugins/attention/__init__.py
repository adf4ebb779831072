"""attention: attention over whole packed prompts, without a cache.

q [..., T, Hq, D], k and v [..., T, Hkv, D], positions [..., T] int, slopes and sinks [Hq] (may
be absent) -> out [..., T, Hq, D]. A new sequence starts where the position is not the previous one plus 1.
Exists while a model is traced; a pass replaces it by paged_attention, whose attributes it has.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "attention",
    inputs=("q", "k", "v", "positions"),
    weights=("slopes?", "sinks?"),
    attrs={"layer": int, "scale": float, "window": int, "softcap": float, "alibi": bool},
    weights_if={"slopes": "alibi"},
)
