"""What a tactic on the CPU target is: the contract between executor, timer and plugins.

Importing this module does not import torch; a tactic's methods may.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tapeout.plugins.op import AttrValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HostCpu:
    """The instruction sets and threads tactics may use.

    `level` is the micro-architecture level kernels are compiled for: `x86_64_v2`,
    `x86_64_v3` (AVX2, FMA), `x86_64_v4` (AVX-512) or `aarch64`.
    """

    level: str
    threads: int


@dataclass(frozen=True)
class TensorType:
    """dtype name (`float32`, `bfloat16`, `int8`, ...) and shape; `shape[0]` of an
    activation is the number of rows of the case at hand or a symbol (`T`, `R`)."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class OpSignature:
    """What decides which tactics can run an op and how fast: types and attributes.

    `layer` and other attributes that do not change speed are left out, so that all
    layers share one choice. `key()` is stable across machines and Python versions.
    """

    op: str
    inputs: tuple[TensorType, ...]
    weights: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    attrs: Mapping[str, AttrValue] = field(default_factory=dict)

    def key(self) -> str:
        """For example `linear(float32[T,576];float32[960,576])->float32[T,960]{}`."""

        def types(ts: tuple[TensorType, ...]) -> str:
            return ",".join(f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in ts)

        attrs = ",".join(f"{k}={v!r}" for k, v in sorted(self.attrs.items()))
        return f"{self.op}({types(self.inputs)};{types(self.weights)})->{types(self.outputs)}{{{attrs}}}"


@dataclass
class StepState:
    """Step metadata at fixed addresses, sized for the engine's limits (all int32, CPU).

    Kernels read the real counts from here; rows beyond the counts are stale. Sequence b of
    the step owns packed rows `cu_q[b]:cu_q[b+1]`; its first row has position
    `kv_lens[b] - (cu_q[b+1] - cu_q[b])`; after the step its cache holds `kv_lens[b]` tokens,
    token i in page `page_table[b, i // tokens_per_page]`.

    Attributes:
        counts: [4] num_rows (T), num_seqs (B), max_q (longest row run), max_kv (longest kv_len).
        token_ids: [max_num_tokens]. positions: [max_num_tokens].
        cu_q: [max_batch_size + 1]. kv_lens: [max_batch_size].
        page_table: [max_batch_size, max_pages_per_seq].
        row_ids: [max_batch_size] rows whose logits are wanted (R of them).
        kv_pool: [num_pages, layers, 2, kv_heads, tokens_per_page, head_dim], the cache dtype.
    """

    counts: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    row_ids: torch.Tensor
    kv_pool: torch.Tensor
    tokens_per_page: int


@dataclass(frozen=True)
class BoundCall:
    """One record with its tensors: views of exactly T (or R) rows, possibly strided.

    A tactic must write every element of `outputs` and nothing else (the attention ops
    also write the KV pages of the step's tokens).
    """

    inputs: Sequence[torch.Tensor]
    weights: Any  # what `prepare` returned
    outputs: Sequence[torch.Tensor]
    attrs: Mapping[str, AttrValue]
    step: StepState
    kernels: Any  # loaded native library (tapeout.plugins.native.NativeLibrary) or None


class CpuTactic(ABC):
    """One way to run an op on a CPU."""

    op: str
    name: str
    #: True when a row's result depends on that row alone, whatever T is.
    batch_invariant: bool = False

    def unsupported(self, signature: OpSignature, host: HostCpu) -> str | None:
        """Why this tactic cannot run the signature on the host; None when it can."""
        return None

    def prepare(self, weights: Sequence[torch.Tensor | None], attrs: Mapping[str, AttrValue]) -> Any:
        """Turn mapped weights into what `bind` wants, once at load (default: as they are)."""
        return weights

    @abstractmethod
    def bind(self, call: BoundCall) -> Callable[[], None]:
        """A closure that runs the record; called once per bucket, replayed every step."""
