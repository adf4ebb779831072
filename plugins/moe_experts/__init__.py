"""moe_experts: the MLPs of a mixture of experts, each row through the experts it was routed to.

x [..., H], expert_ids [..., K] int, expert_weights [..., K] float, up [E, U, H], down [E, H, I], up_bias
[E, U], down_bias [E, H] -> out [..., H], the weighted sum of the K experts' results. U is 2 I (`gated`:
gate, then up) or I. The biases are both there (`has_bias`) or both absent.

`activation`: a kind of the op `activation`; gated: act(gate) * up. `swiglu_clamped`: gate is cut off above
`limit`, up at both sides, and gate * sigmoid(alpha * gate) * (up + 1) follows; elsewhere alpha and limit
are 0. Products, biases and activations are rounded to x's dtype one after the other; the sum over K is
float32 and rounded once.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "moe_experts",
    inputs=("x", "expert_ids", "expert_weights"),
    weights=("up", "down", "up_bias?", "down_bias?"),
    attrs={"activation": str, "gated": bool, "has_bias": bool, "alpha": float, "limit": float},
    weights_if={"up_bias": "has_bias", "down_bias": "has_bias"},
    matrices=("up", "down"),
)
