"""Names of the files a Hugging Face directory keeps its tokenizer in."""

from __future__ import annotations

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json",
    "tiktoken.model", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
