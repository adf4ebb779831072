"""Tensors of a GGUF file by their HF names. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tapeout.model_defs.gguf_families import GgufFamily
from tapeout.model_defs.gguf_file import GgufFile
from tapeout.model_defs.gguf_tensors import HeadCounts
from tapeout.model_defs.hf_checkpoint import digest_checkpoint
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.tensor_hashes import TensorHashes
from tapeout.plugins.errors import UsageError


@dataclass(frozen=True)
class GgufCheckpoint:
    """Implements `Checkpoint`: HF names, float32 values, dequantized one tensor at a time.

    Attributes:
        gguf_names: by HF name; a part of a parameter has its GGUF name on both sides.
    """

    file: GgufFile
    gguf_names: Mapping[str, str]
    family: GgufFamily
    heads: HeadCounts

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            hf_name: TensorInfo(hf_name, "float32", self.file.tensors[gguf_name].shape)
            for hf_name, gguf_name in self.gguf_names.items()
        }

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        found = ((hf_name, self.file.tensors[gguf_name]) for hf_name, gguf_name in self.gguf_names.items())
        return {hf_name: TensorInfo(t.name, t.type.name, t.shape) for hf_name, t in found}

    def read(self, name: str) -> np.ndarray:
        gguf_name = self.gguf_names[name]
        try:
            weights = self.file.dequantize(gguf_name)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.file.path}: tensor {gguf_name!r} cannot be read: {error}") from error
        return self.family.transform(weights, gguf_name, self.heads)

    @cached_property
    def hashes(self) -> TensorHashes:
        found = ((hf_name, self.file.tensors[gguf_name]) for hf_name, gguf_name in self.gguf_names.items())
        return TensorHashes((hf_name, self.file.path, t.start, t.nbytes) for hf_name, t in found)

    def digest(self) -> str:
        return digest_checkpoint(self)
