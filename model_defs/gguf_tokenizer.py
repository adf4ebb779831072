"""The tokenizer a GGUF file describes, built with transformers' own converters."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from tapeout.model_defs.gguf_file import GgufFile
from tapeout.plugins.errors import UnsupportedError, UsageError

# `tokenizer.ggml.pre` values transformers' split table lacks, by llama.cpp's rules for them.
# Digits one by one, then GPT-2's pattern on the pieces: what SmolLM's tokenizer.json states. With
# GPT-2's pattern alone "a   1" would give two spaces and " 1" instead of three spaces and "1".
DIGITS_THEN_GPT2 = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
GPT2_PATTERN = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})
# Names whose split transformers' table has under another name.
SAME_SPLIT = {"stablelm2": "qwen2"}
BLOOM_PATTERN = r" ?[^(\s|.,!?…。，、।۔،)]+"

_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(file: GgufFile) -> Any | None:
    """A transformers tokenizer for the file, or None when the file has no vocabulary.

    Errors: UnsupportedError for a tokenizer model or pre-tokenizer nothing is known about;
    UsageError when the vocabulary is inconsistent.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    meta = file.metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    fields, options = (
        {name: meta[f"tokenizer.{key}"] for key, name in GGUF_TOKENIZER_MAPPING[group].items()
         if f"tokenizer.{key}" in meta}
        for group in ("tokenizer", "tokenizer_config")
    )  # fmt: skip
    if not isinstance(fields.get("tokens"), list):
        raise UsageError(f"{file.path} has tokenizer {kind!r} but no tokenizer.ggml.tokens")
    if kind == "llama":
        options.setdefault("add_bos_token", True)  # llama.cpp's default for sentencepiece vocabularies
    tokens = fields["tokens"]
    for name, key in _SPECIAL_IDS.items():
        token_id = meta.get(f"tokenizer.ggml.{key}")
        if token_id is not None and token_id >= len(tokens):
            raise UsageError(
                f"{file.path}: tokenizer.ggml.{key} is {token_id}, the vocabulary has {len(tokens)}"
            )
        options[name] = None if token_id is None else tokens[token_id]
    split = _known_split(file, kind)
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, fields)
    except (ValueError, KeyError) as error:
        raise UnsupportedError(f"{file.path}: tokenizer {kind!r} cannot be built: {error}") from error
    if split is not None:
        backend.pre_tokenizer = split
    if kind == "llama" and fields.get("add_prefix_space") is False:
        _drop_space_prefix(backend)
    # as AutoTokenizer does: the options carry special tokens, BOS/EOS flags and the chat template
    return PreTrainedTokenizerFast(tokenizer_object=_within_vocabulary(backend, len(tokens)), **options)


def _known_split(file: GgufFile, kind: str) -> Any | None:
    """The pre-tokenizer to put in, None when transformers' converter sets the right one."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    pre = file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre in GGUF_PRE_TOKENIZER_SPLITS or pre in GPT2_PATTERN:
        return None
    if pre in SAME_SPLIT:
        return _byte_level_split(GGUF_PRE_TOKENIZER_SPLITS[SAME_SPLIT[pre]])
    if pre == "bloom":
        return _byte_level_split(BLOOM_PATTERN)
    if pre == "falcon":  # punctuation in runs, GPT-2's pattern, then digits in threes
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        )
    if pre in DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    known = sorted(
        DIGITS_THEN_GPT2
        | GPT2_PATTERN
        | GGUF_PRE_TOKENIZER_SPLITS.keys()
        | SAME_SPLIT.keys()
        | {"bloom", "falcon"}
    )
    raise UnsupportedError(
        f"{file.path}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) has no known split rules; "
        f"known: {', '.join(known)}",
        hint="use the model's Hugging Face checkpoint, or add its rules to model_defs/gguf_tokenizer.py",
    )


def _byte_level_split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _drop_space_prefix(backend: Tokenizer) -> None:
    """Honour `add_space_prefix: false`, which transformers' GGUF converter reads and ignores."""
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        return  # Gemma and Phi-3 have normalizers of their own
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    # LlamaTokenizer(add_prefix_space=False): no space is stripped from the front either
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _within_vocabulary(backend: Tokenizer, vocab_size: int) -> Tokenizer:
    """Without added tokens the file does not have.

    transformers builds byte-level vocabularies through its GPT-2 class, which appends
    `<|endoftext|>` to a vocabulary that lacks it: an id the model has no row for.
    """
    if backend.get_vocab_size() <= vocab_size:
        return backend
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < vocab_size]
    return Tokenizer.from_str(json.dumps(data))
