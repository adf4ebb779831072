"""Classify an attention mask from the index function Hugging Face builds it from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tapeout.plugins.errors import UnsupportedError

# Query positions that tell causal, sliding and chunked masks apart; the largest is above every
# window in use, and a wider window never cuts anything off within it. The last two are neighbours:
# a sliding window starts one key later at the second, a chunk at the same key.
_PROBES = (0, 1, 5, 1_023, 100_003, 262_146, 262_147)


@dataclass(frozen=True)
class Mask:
    """A causal mask; with `window` > 0 a query sees the last `window` positions, itself included."""

    window: int = 0


class MarkOnes(TorchFunctionMode):
    """While it is entered, tensors of ones and their casts are remembered as such.

    Some models make a padding mask of ones when they are given none. Its values cannot be looked at in the
    middle of an export, so it is recognized by how it was made.
    """

    _CASTS = frozenset({torch.Tensor.to, torch.Tensor.bool, torch.Tensor.long, torch.Tensor.float})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ones, torch.ones_like) or (func in self._CASTS and hides_nothing(args[0])):
            result._tapeout_ones = True
        return result


def hides_nothing(padding_mask: torch.Tensor) -> bool:
    """Whether a padding mask was made as ones while `MarkOnes` was entered."""
    return bool(getattr(padding_mask, "_tapeout_ones", False))


def classify(mask_function: Callable[..., Any]) -> Mask:
    """Find out what `mask_function(batch, head, query, key) -> allowed` means.

    Raises UnsupportedError for anything but causal and sliding-window masks, because a mask
    that is not understood would be dropped in silence.
    """
    starts = [_first_allowed(mask_function, q) for q in _PROBES]
    if all(s == 0 for s in starts):
        return Mask()
    window = _PROBES[-1] - starts[-1] + 1
    if all(s == max(0, q - window + 1) for q, s in zip(_PROBES, starts, strict=True)):
        return Mask(window)
    found = ", ".join(f"query {q} sees keys from {s}" for q, s in zip(_PROBES, starts, strict=True))
    raise UnsupportedError(
        f"attention mask is neither causal nor a sliding window: {found}",
        hint="chunked and prefix masks are not supported yet",
    )


def _first_allowed(mask_function: Callable[..., Any], query: int) -> int:
    """First key the query sees; the keys it sees must be one run that ends at the query."""
    with _disable_current_modes():  # the probe runs on real tensors in the middle of an export
        q = torch.tensor(query)
        k = torch.arange(query + 3)
        zero = torch.tensor(0)
        allowed = torch.as_tensor(mask_function(zero, zero, q, k)).broadcast_to(k.shape)
        keys = allowed.nonzero().flatten()
        if not len(keys) or keys[-1] != query or len(keys) != query - int(keys[0]) + 1:
            raise UnsupportedError(
                f"attention mask at query {query} is not one run of keys that ends at the query",
                hint="only causal and sliding-window attention is supported",
            )
        return int(keys[0])
