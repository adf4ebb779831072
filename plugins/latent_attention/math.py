"""Attention over latents in plain torch: the definition both latent attention ops share."""

from __future__ import annotations

import torch


def attend_latents(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q_nope [Q, H, N], q_rot [Q, H, P], latent [K, R], k_rot [K, P], visible bool [Q, K] -> [Q, H, V].

    Queries are taken to the latents' space and results from it, so that no head's keys are ever made.
    Computed in float32; the result has q_nope's dtype.
    """
    rows = latent.float()
    inside = torch.einsum("qhn,hnr->qhr", q_nope.float(), up_key.float())
    scores = torch.einsum("qhr,kr->hqk", inside, rows)
    scores = (scores + torch.einsum("qhp,kp->hqk", q_rot.float(), k_rot.float())) * scale
    probabilities = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    mixed = torch.einsum("hqk,kr->qhr", probabilities, rows)
    return torch.einsum("qhr,hvr->qhv", mixed, up_value.float()).to(q_nope.dtype)
