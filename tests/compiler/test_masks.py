"""Masks are understood exactly or refused: a mask that is dropped in silence gives wrong tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from tapeout.compiler.masks import Mask, classify
from tapeout.plugins.errors import UnsupportedError


def test_hf_causal_mask_has_no_window() -> None:
    assert classify(causal_mask_function) == Mask(window=0)


@pytest.mark.parametrize("window", [1, 2, 8, 512, 4096, 100_003, 131_072])
def test_sliding_windows(window: int) -> None:
    assert classify(sliding_window_causal_mask_function(window)) == Mask(window)


def test_a_window_beyond_every_position_is_causal() -> None:
    assert classify(sliding_window_causal_mask_function(1 << 20)) == Mask()


# 5067 divides the distance of two probes: a chunk of it looks like a window to all but neighbouring queries.
@pytest.mark.parametrize("chunk", [2, 16, 5067, 8192, 131_072])
def test_chunked_masks_are_refused(chunk: int) -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a sliding window") as caught:
        classify(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)))
    assert "query 262147 sees keys from" in caught.value.message


@pytest.mark.parametrize("prefix", [2, 7, 4000])
def test_prefix_masks_are_refused(prefix: int) -> None:
    def prefix_lm(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) | ((k < prefix) & (q < prefix))

    with pytest.raises(UnsupportedError, match="not one run of keys that ends at the query"):
        classify(prefix_lm)


def bidirectional(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k >= 0


def keys_of_the_same_parity(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k - q) % 2 == 0


def strictly_before(batch: object, head: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k < q


@pytest.mark.parametrize(
    "function",
    [
        bidirectional,
        strictly_before,
        and_masks(causal_mask_function, keys_of_the_same_parity),
        # attention sinks: the first keys and a window
        or_masks(
            sliding_window_causal_mask_function(8),
            and_masks(causal_mask_function, lambda b, h, q, k: k < 4),
        ),
    ],
)
def test_other_masks_are_refused(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        classify(function)
    assert caught.value.hint is not None
