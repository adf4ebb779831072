"""moe_router: which experts a row goes to, and how much each counts.

logits [..., E], bias [E] (may be absent) -> expert_ids [..., K] int32, expert_weights [..., K] float32.
Everything is computed in float32:

1. scores: softmax or sigmoid of the logits (`scoring`); `softmax_of_chosen`: the logits themselves.
2. choice = scores + bias. With `groups` > 1 experts stand in equal groups; a group counts as much as its
   best choice (`group_by` best) or as its best two together (best_two); outside the best `chosen_groups`
   a choice becomes 0.
3. expert_ids: the `chosen` largest choices, the largest first, of equals the lowest id.
4. expert_weights: the scores of these (softmax_of_chosen: the softmax of these logits alone); divided by
   their sum when `normalize`; times `scale`.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema(
    "moe_router",
    inputs=("logits",),
    weights=("bias?",),
    outputs=("expert_ids", "expert_weights"),
    attrs={
        "chosen": int,
        "scoring": str,
        "groups": int,
        "chosen_groups": int,
        "group_by": str,
        "normalize": bool,
        "scale": float,
    },
)
