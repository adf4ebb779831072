"""The manifest: everything about an engine that is not program, kernel, text or weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapeout.runtime.engine.codec import decode, encode

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Limits:
    """What the engine was built for. Tokens, unless the name says otherwise."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_page: int

    @property
    def pages_per_sequence(self) -> int:
        """Pages of the longest sequence: the width of a page table."""
        return -(-self.max_seq_len // self.tokens_per_page)

    @property
    def pool_pages(self) -> int:
        """Pages with which every request of a full batch may reach the longest sequence."""
        return self.max_batch_size * self.pages_per_sequence


@dataclass(frozen=True)
class KvCacheLayout:
    """Pages `[page, layer, K|V, head, token, dim]` of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def page_bytes(self, tokens_per_page: int) -> int:
        """Bytes of one page of all layers, K and V."""
        item = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * tokens_per_page * self.head_dim * item


@dataclass(frozen=True)
class ModelFacts:
    """What the runtime and its users need to know about the model."""

    architecture: str
    model_type: str
    dtype: str
    quantize: str
    vocab_size: int  # logit width
    max_position_embeddings: int
    checkpoint: str  # what it came from: format and digest of config and weights, no path
    stored_types: Mapping[str, int] = field(default_factory=dict)  # its tensors by type (`Q4_K`, `bfloat16`)


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts the runtime cannot read from tokenizer.json.

    `eos_token_ids` already follows HF's precedence (generation_config over config over
    tokenizer). `special_tokens` are the names a chat template may use (bos_token, ...).
    `vocab_size` is the number of ids the tokenizer knows; larger ids are never sampled.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionTime:
    """What runs a dense region at one bucket, and what both ways to run it were measured to take.

    Attributes:
        digest: of its computation; regions of one shape have one. regions: of the model that have it.
        ops: of one of them.
        kind: `mixed` or `decode`. rows, logit_rows: of the bucket, in T and R.
        winner: `tensorrt` or `native`.
        segment_us, own_us: microseconds by the TensorRT segment, and by our kernels one after the other.
        reason: why the segment has no time; "" where it has.
    """

    digest: str
    regions: int
    ops: tuple[str, ...]
    kind: str
    rows: int
    logit_rows: int
    winner: str
    segment_us: float | None
    own_us: float | None
    reason: str


@dataclass(frozen=True)
class Manifest:
    """Identity, limits and facts of an engine.

    `target` is `cpu:<level>` or `cuda:<sku>`; `versions` names builder, kernel compiler and
    format; `parity` is the verdict of the build's comparison with HF (or says it was
    skipped); `options` are the effective build options; `generation` holds the model's
    generation defaults; `regions` says what TensorRT competed for, and is left out where it did not.
    Nothing here depends on host, path or time.
    """

    format_version: int
    target: str
    model: ModelFacts
    limits: Limits
    kv_cache: KvCacheLayout
    tokenizer: TokenizerFacts | None
    generation: Mapping[str, Any]
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    passes: Mapping[str, int]
    parity: Mapping[str, Any]
    timed: bool
    weights: Mapping[str, Any] = field(default_factory=dict)  # {"storage": embedded|shared, "digest", "file"}
    regions: tuple[RegionTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data for the engine's metadata; inverse of `from_json`."""
        data: dict[str, Any] = encode(self)
        return data if self.regions else {key: value for key, value in data.items() if key != "regions"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Rebuild a manifest; raises EngineCorruptError on unknown or missing keys."""
        known = {"regions": [], **data} if isinstance(data, Mapping) else data
        return decode(cls, known, "manifest")
