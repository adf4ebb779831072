"""A GGUF file's metadata of its architecture, with a memory of what was asked for.

A key that nobody asked for would change what the model computes without a word, so it is an error.
"""

from __future__ import annotations

from typing import Any

from tapeout.model_defs.gguf_file import GgufFile
from tapeout.plugins.errors import UnsupportedError, UsageError

AS_HF = "use the model's Hugging Face checkpoint (config.json and safetensors) instead"

# Keys that change nothing for the families that are read, with the reason.
IRRELEVANT = {
    "vocab_size": "the rows of the embedding are taken",
    "tensor_data_layout": "a note on llama.cpp's order of q and k rows, which the architecture decides",
    "rope.scaling.finetuned": "how the model was trained",
}


class ArchMetadata:
    """Metadata below `<architecture>.`, by the rest of the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.arch = file.architecture
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`, or `default`."""
        self._read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def required(self, key: str) -> Any:
        """The value; UsageError when the file lacks it or it is 0."""
        value = self.get(key)
        if not value:
            raise UsageError(f"{self.file.path} lacks metadata: {self.arch}.{key}")
        return value

    def expect(self, key: str, value: Any, meaning: str) -> None:
        """UnsupportedError when the file states another value than the only one that can be built."""
        stated = self.get(key, value)
        if stated != value:
            raise UnsupportedError(
                f"{self.file.path}: {self.arch}.{key} is {stated!r}, only {value!r} ({meaning}) is supported",
                hint=AS_HF,
            )

    def ignore(self, key: str, reason: str) -> None:
        """The key has no effect in this architecture, for `reason`."""
        assert reason
        self._read.add(key)

    def check_all_read(self) -> None:
        """UnsupportedError listing the keys that nobody asked for."""
        prefix = f"{self.arch}."
        keys = {k.removeprefix(prefix) for k in self.file.metadata if k.startswith(prefix)}
        if unread := sorted(keys - self._read - IRRELEVANT.keys()):
            lines = [f"  {prefix}{key} = {self.file.metadata[prefix + key]!r}"[:200] for key in unread]
            raise UnsupportedError(
                f"{self.file.path} states what has no effect here and may change the model:\n"
                + "\n".join(lines),
                hint=AS_HF,
            )
