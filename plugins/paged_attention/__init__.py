"""paged_attention: write the step's keys and values into the cache, then attend over it.

q [..., T, Hq, D], k and v [..., T, Hkv, D], slopes and sinks [Hq] (may be absent) -> out
[..., T, Hq, D].
Causal per sequence, grouped queries (query head h reads kv head h // (Hq / Hkv)).

`layer`: index into kv_pool. `scale`: factor on q.k. `window`: a query at position p sees keys
p - window + 1 .. p; 0 = all. `softcap`: scores become softcap * tanh(scores / softcap); 0 =
off. `sinks`: one more logit per head that takes part in the softmax and carries no value. `alibi`:
slopes (float32) are there, and slope * (key position - query position) is added to scores (after scale and
softcap).

Order of the torch op's arguments: q, k, v, slopes, sinks, kv_pool (mutated), page_table, cu_q,
kv_lens, layer, scale, window, softcap, alibi. The step tensors there have exactly the step's
size (cu_q [B + 1], kv_lens [B], page_table [B, pages]); see StepState for their meaning.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "paged_attention",
    inputs=("q", "k", "v"),
    weights=("slopes?", "sinks?"),
    attrs={"layer": int, "scale": float, "window": int, "softcap": float, "alibi": bool},
    weights_if={"slopes": "alibi"},
    step_inputs=("kv_pool", "page_table", "cu_q", "kv_lens"),
)
