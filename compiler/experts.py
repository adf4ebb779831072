"""The experts of MoE layers under trace: Hugging Face's experts interface to `tapeout::moe_experts`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tapeout.plugins.activation.functions import FUNCTIONS
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.moe_experts.reference import CLAMPED, gate_activation
from tapeout.plugins.registry import register_torch_ops

register_torch_ops()

_ROWS, _WIDTH = 64, 8  # of the numbers that a gate is tried with


def experts_interface(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Called by HF in place of the experts: hidden `[T, H]`, ids and weights `[T, K]` -> `[T, H]`.

    Raises UnsupportedError, naming the class, for experts that compute something else than the op.
    """
    if getattr(self, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{type(self).__name__} normalizes the results of its experts, which is not supported yet"
        )
    gated = bool(self.has_gate)
    activation, interleaved, alpha, limit = _gate(self) if gated else (_plain(self), False, 0.0, 0.0)
    name = "gate_up_proj" if gated else "up_proj"
    up, down = getattr(self, name), self.down_proj
    up_bias = getattr(self, f"{name}_bias") if self.has_bias else None
    down_bias = self.down_proj_bias if self.has_bias else None
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if interleaved:  # gate and up alternate: the op wants one after the other
        up = torch.cat((up[:, ::2], up[:, 1::2]), dim=1)
        up_bias = None if up_bias is None else torch.cat((up_bias[:, ::2], up_bias[:, 1::2]), dim=1)
    return torch.ops.tapeout.moe_experts(
        hidden_states, top_k_index, top_k_weights, up, down, up_bias, down_bias,
        activation, gated, bool(self.has_bias), alpha, limit,
    )  # fmt: skip


ALL_EXPERTS_FUNCTIONS.register("tapeout", experts_interface)


def _plain(module: nn.Module) -> str:
    points = torch.linspace(-6, 6, _ROWS * _WIDTH).reshape(_ROWS, _WIDTH)
    with _disable_current_modes(), torch.no_grad():
        got = module.act_fn(points)
        for kind, function in FUNCTIONS.items():
            if torch.allclose(got, function(points), rtol=1e-5, atol=1e-6):
                return kind
    raise _unknown(module, "activation of its experts")


def _gate(module: nn.Module) -> tuple[str, bool, float, float]:
    """What `_apply_gate` computes: activation, whether gate and up alternate, alpha, limit."""
    with _disable_current_modes(), torch.no_grad():
        projected = 4 * torch.randn((_ROWS, 2 * _WIDTH), generator=torch.Generator().manual_seed(0))
        got = module._apply_gate(projected)
        for interleaved in (False, True):
            halves = torch.cat((projected[:, ::2], projected[:, 1::2]), -1) if interleaved else projected
            for kind, alpha, limit in _candidates(module):
                expected = gate_activation(halves, kind, True, alpha, limit)
                if torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
                    return kind, interleaved, alpha, limit
    raise _unknown(module, "gate of its experts")


def _candidates(module: nn.Module) -> list[tuple[str, float, float]]:
    """Kinds with alpha and limit; those of a clamped gate are attributes of the module."""
    candidates = [(kind, 0.0, 0.0) for kind in FUNCTIONS]
    numbers = [v for v in vars(module).values() if isinstance(v, float)]
    return candidates + [(CLAMPED, a, b) for a in numbers for b in numbers]


def _unknown(module: nn.Module, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} ({type(module).__name__}) is none that tapeout knows: {', '.join(FUNCTIONS)}, {CLAMPED}",
        hint="a new kind is one line in plugins/activation/functions.py and one in its kernels",
    )
