"""How Hugging Face models spell rotary position embedding, rotate-half style.

`cos` and `sin` are broadcastable to x `[1, H, T, D]`. `half` is D / 2.
"""

from __future__ import annotations

import torch


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> tuple[torch.Tensor]:
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin),)
