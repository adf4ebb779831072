"""latent_attention: multi-head latent attention over whole packed prompts, without a cache.

Keys and values of all heads are made from one vector a token, the latent; a second, rotated vector is
part of every head's key. q_nope [..., T, H, N], q_rot [..., T, H, P], latent [..., T, R], k_rot [..., T, P],
positions [..., T] int, up_key [H, N, R], up_value [H, V, R] -> out [..., T, H, V]. Head h has the key
(up_key[h] latent, k_rot) and the value up_value[h] latent. A new sequence starts where the position is not
the previous one plus 1. Exists while a model is traced; a pass replaces it by paged_latent_attention.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "latent_attention",
    inputs=("q_nope", "q_rot", "latent", "k_rot", "positions"),
    weights=("up_key", "up_value"),
    attrs={"layer": int, "scale": float, "window": int},
)
