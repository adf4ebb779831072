"""Codes of the activation functions in activation.h."""

from __future__ import annotations

from tapeout.plugins.errors import UnsupportedError

ACTIVATION_CODES = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "tanh": 4, "sigmoid": 5, "relu2": 6, "quick_gelu": 7,
    "softplus": 8,
}  # fmt: skip


def activation_code(kind: str) -> int:
    """Raises UnsupportedError for an unknown name."""
    if kind not in ACTIVATION_CODES:
        raise UnsupportedError(f"activation {kind!r} is not one of {', '.join(ACTIVATION_CODES)}")
    return ACTIVATION_CODES[kind]
