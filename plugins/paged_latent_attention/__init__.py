"""paged_latent_attention: write the step's latents into the cache, then attend over them.

Arguments as of latent_attention, in place of positions the step tensors. The cache holds latent | k_rot,
R + P elements a token and layer whatever the number of heads. It lies in the pool of one kv head and
head_dim (R + P) / 2: its first half in the place of the key, its second in the place of the value.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "paged_latent_attention",
    inputs=("q_nope", "q_rot", "latent", "k_rot"),
    weights=("up_key", "up_value"),
    attrs={"layer": int, "scale": float, "window": int},
    step_inputs=("kv_pool", "page_table", "cu_q", "kv_lens"),
    latents=(2, 3),
    matrices=("up_key", "up_value"),
)
