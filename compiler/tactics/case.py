"""Random tensors for one op signature at one row count: what tactics are checked and timed on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tapeout.plugins.cpu import OpSignature, StepState, TensorType
from tapeout.plugins.registry import OPS
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.kv_cache import pages_for

_POOL_LAYERS = 1
_MAX_COPIES = 32  # of weights; small ones stay in cache in a real step too
_DECODE_CONTEXT_TOKENS = 512  # cache length of the sequences decode attention is timed on


@dataclass(frozen=True)
class Case:
    """Inputs, `copies` of the weights, and step metadata. Outputs are made poisoned, one set a call.

    Weights rotate over `copies` sets that together exceed the caches, as layers do in a step.
    """

    rows: int
    inputs: tuple[torch.Tensor, ...]
    weights: tuple[tuple[torch.Tensor | None, ...], ...]
    step: StepState
    output_types: tuple[TensorType, ...]

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Output tensors full of NaN (-1 in integers), so that an element nobody wrote is seen."""
        return tuple(
            torch.full(_sized(t, self.rows), -1 if t.dtype.startswith("int") else math.nan, dtype=_dtype(t))
            for t in self.output_types
        )


def make_weights(
    signature: OpSignature, bytes_wanted: int, seed: int
) -> tuple[tuple[torch.Tensor | None, ...], ...]:
    """Enough sets of weights to hold `bytes_wanted`, at least one."""
    generator = torch.Generator().manual_seed(seed)
    first = tuple(_random_weight(t, generator) for t in signature.weights)
    size = sum(w.numel() * w.element_size() for w in first)
    copies = min(_MAX_COPIES, max(1, math.ceil(bytes_wanted / size))) if size else 1
    return (first, *(tuple(w.clone() for w in first) for _ in range(copies - 1)))


def make_case(
    signature: OpSignature,
    rows: int,
    weights: tuple[tuple[torch.Tensor | None, ...], ...],
    limits: Limits,
    seed: int,
) -> Case:
    """A case of `rows` rows; for attention up to `max_batch_size` rows are decode, more are one prompt."""
    generator = torch.Generator().manual_seed(seed + rows)
    step = _step_state(signature, rows, limits, generator)
    inputs = []
    for index, type_ in enumerate(signature.inputs):
        if type_.dtype == "int32":
            inputs.append(_indices(signature, index, rows, step, generator))
        else:
            # Of an op over logit rows, a T operand is the step's whole length.
            leading = rows if type_.shape[0] == signature.outputs[0].shape[0] else int(step.counts[0])
            inputs.append(torch.randn(_sized(type_, leading), generator=generator).to(_dtype(type_)))
    return Case(rows, tuple(inputs), weights, step, signature.outputs)


def _indices(
    signature: OpSignature, index: int, rows: int, step: StepState, generator: torch.Generator
) -> torch.Tensor:
    """Integer inputs in the range their op allows."""
    if signature.op == "moe_experts":  # distinct ones in every row
        experts, chosen = int(signature.weights[0].shape[0]), int(signature.inputs[index].shape[1])
        order = torch.rand((rows, experts), generator=generator).argsort(1)
        return order[:, :chosen].to(torch.int32).contiguous()
    if signature.op == "embedding":
        high = int(signature.weights[0].shape[0])
    elif signature.op == "select_rows":
        high = int(step.counts[0])
    else:
        high = int(step.counts[3])
    return torch.randint(0, high, (rows,), generator=generator, dtype=torch.int32)


def _random_weight(type_: TensorType, generator: torch.Generator) -> torch.Tensor:
    shape = [int(d) for d in type_.shape]
    if type_.dtype == "int8":
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
    return (torch.randn(shape, generator=generator) * scale).to(_dtype(type_))


def _step_state(signature: OpSignature, rows: int, limits: Limits, generator: torch.Generator) -> StepState:
    """Metadata for `rows` packed rows, over shuffled pages."""
    decode = rows <= limits.max_batch_size
    sequences = rows if decode else 1
    kv_len = min(_DECODE_CONTEXT_TOKENS, limits.max_seq_len) if decode else rows
    pages = pages_for(kv_len, limits.tokens_per_page)
    kv_heads, head_dim, cache_dtype = _cache_shape(signature)
    table = torch.randperm(sequences * pages, generator=generator).to(torch.int32).view(sequences, pages)
    pool = (sequences * pages, _POOL_LAYERS, 2, kv_heads, limits.tokens_per_page, head_dim)
    per_sequence = rows // sequences
    positions = torch.arange(kv_len - per_sequence, kv_len, dtype=torch.int32).repeat(sequences)
    step_rows = limits.max_num_tokens if signature.op == "select_rows" else rows
    return StepState(
        counts=torch.tensor([step_rows, sequences, per_sequence, kv_len], dtype=torch.int32),
        token_ids=torch.zeros(rows, dtype=torch.int32),
        positions=positions,
        cu_q=torch.arange(sequences + 1, dtype=torch.int32) * per_sequence,
        kv_lens=torch.full((sequences,), kv_len, dtype=torch.int32),
        page_table=table,
        row_ids=torch.zeros(limits.max_batch_size, dtype=torch.int32),
        kv_pool=torch.randn(pool, generator=generator).to(cache_dtype),
        tokens_per_page=limits.tokens_per_page,
    )


def _cache_shape(signature: OpSignature) -> tuple[int, int, torch.dtype]:
    if not OPS[signature.op].reads_cache:
        return 1, 1, torch.float32
    shape = OPS[signature.op].cache_shape([t.shape for t in signature.inputs])
    return *shape, _dtype(signature.inputs[1])


def _sized(type_: TensorType, rows: int) -> list[int]:
    """The shape with its leading symbol replaced."""
    return [rows, *(int(d) for d in type_.shape[1:])]


def _dtype(type_: TensorType) -> torch.dtype:
    dtype = getattr(torch, type_.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def layerless(attrs: Mapping[str, int | float | str | bool], op: str) -> dict[str, int | float | str | bool]:
    """Attributes with the instance a case stands for: layer 0."""
    return {**attrs, "layer": 0} if "layer" in OPS[op].attrs else dict(attrs)
