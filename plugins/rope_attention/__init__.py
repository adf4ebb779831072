"""rope_attention: rotate the step's queries and keys, then paged_attention, which writes the cache.

q [..., T, Hq, D], k and v [..., T, Hkv, D], table [..., T, D] (see rope_table), q_norm and k_norm
[D] and sinks [Hq] (may be absent) -> out [..., T, Hq, D].

`qk_norm`: q_norm and k_norm are there, and rms_norm over the head comes before the rotation, with
`eps`, `weight_offset` and `cast_before_weight` as in rms_norm; otherwise these are 0, 0 and false.
`interleaved` as in rope, over whole heads; the other attributes and the step tensors as in
paged_attention. All of it equals rms_norm, rope and paged_attention one after the other, with their
roundings: the cache holds the rotated keys.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "rope_attention",
    inputs=("q", "k", "v", "table"),
    weights=("q_norm?", "k_norm?", "sinks?"),
    attrs={
        "layer": int,
        "scale": float,
        "window": int,
        "softcap": float,
        "interleaved": bool,
        "qk_norm": bool,
        "eps": float,
        "weight_offset": float,
        "cast_before_weight": bool,
    },
    step_inputs=("kv_pool", "page_table", "cu_q", "kv_lens"),
    weights_if={"q_norm": "qk_norm", "k_norm": "qk_norm"},
)
