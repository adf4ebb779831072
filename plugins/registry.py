"""All ops by name. Importing this module imports schemas only, never torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from tapeout.plugins import (
    activation,
    add,
    add_rms_norm,
    attention,
    causal_mask,
    copy,
    embedding,
    gated_activation,
    latent_attention,
    layer_norm,
    linear,
    linear_add,
    linear_int8,
    moe_experts,
    moe_router,
    mul,
    mul_weight,
    norm_linear,
    paged_attention,
    paged_latent_attention,
    rms_norm,
    rope,
    rope_attention,
    rope_table,
    scale,
    select_rows,
    xielu,
)
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.op import OpSchema

if TYPE_CHECKING:
    from tapeout.plugins.cpu import CpuTactic
    from tapeout.plugins.cuda import CudaTactic

_FOLDERS = (
    activation, add, add_rms_norm, attention, causal_mask, copy, embedding, gated_activation,
    latent_attention, layer_norm, linear, linear_add, linear_int8, moe_experts, moe_router, mul,
    mul_weight, norm_linear, paged_attention, paged_latent_attention, rms_norm, rope, rope_attention,
    rope_table, scale, select_rows, xielu,
)  # fmt: skip

OPS: Mapping[str, OpSchema] = MappingProxyType({folder.SCHEMA.name: folder.SCHEMA for folder in _FOLDERS})

#: Ops that exist only in traced graphs: no target runs them.
TRACE_ONLY_OPS = frozenset({"attention", "causal_mask", "latent_attention"})

#: Ops that are fused for CUDA targets alone: on a CPU they have the baseline, which checks use.
CUDA_FUSED_OPS = frozenset({"linear_add", "norm_linear", "rope_attention"})


def op(name: str) -> OpSchema:
    """The schema of op `name`; raises UnsupportedError for an unknown one."""
    if name not in OPS:
        near = get_close_matches(name, OPS, n=1)
        raise UnsupportedError(
            f"unknown op {name!r}; known ops: {', '.join(sorted(OPS))}",
            hint=f"did you mean {near[0]!r}?" if near else "the engine may come from a newer tapeout",
        )
    return OPS[name]


@cache
def cpu_tactics(name: str) -> tuple[CpuTactic, ...]:
    """The CPU tactics of op `name`, the baseline `aten` first. Imports torch.

    Empty for ops that exist only in traced graphs.
    """
    schema = op(name)
    if name in TRACE_ONLY_OPS:
        return ()
    tactics: tuple[CpuTactic, ...] = importlib.import_module(f"tapeout.plugins.{schema.name}.cpu").TACTICS
    return tactics


@cache
def cuda_tactics(name: str) -> tuple[CudaTactic, ...]:
    """The CUDA tactics of op `name`, the one that works everywhere first. Imports neither torch nor Triton.

    Empty for ops that exist only in traced graphs and for ops no CUDA kernel runs.
    """
    schema = op(name)
    if name in TRACE_ONLY_OPS:
        return ()
    tactics: tuple[CudaTactic, ...] = importlib.import_module(f"tapeout.plugins.{schema.name}.cuda").TACTICS
    return tactics


def register_torch_ops() -> None:
    """Make every op callable as `torch.ops.tapeout.<name>`; may be called again. Imports torch."""
    for name in OPS:
        importlib.import_module(f"tapeout.plugins.{name}.reference")
