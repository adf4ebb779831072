"""The named activation functions in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional

from tapeout.plugins.errors import UnsupportedError

FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "relu2": lambda x: torch.relu(x).square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "softplus": functional.softplus,
    }
)


def function(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function named `kind`; raises UnsupportedError for an unknown name."""
    if kind not in FUNCTIONS:
        raise UnsupportedError(f"activation {kind!r} is not one of {', '.join(FUNCTIONS)}")
    return FUNCTIONS[kind]
