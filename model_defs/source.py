"""A model as the compiler sees it, wherever it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from tapeout.model_defs.tensor_hashes import TensorHashes
    from tapeout.model_defs.weights import WeightRef


@dataclass(frozen=True)
class TensorInfo:
    """A checkpoint tensor: numpy-style dtype name (`bfloat16` through ml_dtypes) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """Random access to tensors by their HF module name (`model.layers.0...weight`)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, without reading any."""

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """The same tensors as the file has them: name and type there (`blk.0.attn_q.weight`, `Q4_1`)."""

    def read(self, name: str) -> np.ndarray:
        """The tensor in host memory, in `tensors[name].dtype`; nothing is kept. Any thread may call."""

    @property
    def hashes(self) -> TensorHashes:
        """SHA-256 of every tensor's bytes in the file."""

    def digest(self) -> str:
        """SHA-256 that identifies names, types and bytes, independent of path and host."""


@dataclass(frozen=True)
class ModelSource:
    """Config, weights, tokenizer and generation defaults of one model.

    Attributes:
        origin: `hf` or `gguf:<quantization>`; goes into the manifest, never a path.
        config: the transformers config object.
        checkpoint: the weights.
        tokenizer_json: text for `tokenizers.Tokenizer.from_str`, None when there is no tokenizer.
        chat_template: Jinja text or None.
        special_tokens: template variables such as bos_token.
        generation: generation_config as plain data (empty when there is none).
        eos_token_ids: by HF's precedence. bos_token_id, pad_token_id likewise.
        trust_remote_code: whether code from the model folder may run.
        hf_path: directory or GGUF file HF can load from, for parity.
        raw_config: config.json as it is; empty where there is none (GGUF).
        recipes: parameters made from tensors of other names or shapes, where transformers' own conversion
            tables do not say how (GGUF).
        files: what the model is read from, or would be if it were there: nothing may overwrite it.
    """

    origin: str
    config: Any
    checkpoint: Checkpoint
    tokenizer_json: str | None
    tokenizer_vocab_size: int
    chat_template: str | None
    special_tokens: Mapping[str, str]
    generation: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    trust_remote_code: bool
    hf_path: str
    files: tuple[Path, ...] = ()
    raw_config: Mapping[str, Any] = field(default_factory=dict)
    recipes: Mapping[str, WeightRef] = field(default_factory=dict)

    @property
    def stored_types(self) -> dict[str, int]:
        """How many of the checkpoint's tensors are stored in each type, the commonest first."""
        types = Counter(info.dtype for info in self.checkpoint.stored.values())
        return dict(sorted(types.items(), key=lambda item: (-item[1], item[0])))
