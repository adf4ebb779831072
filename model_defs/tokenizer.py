"""Any transformers tokenizer as `tokenizer.json` text plus facts, proven equal before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from tapeout.plugins.errors import UnsupportedError


@dataclass(frozen=True)
class TokenizerParts:
    """What the runtime needs of a tokenizer.

    `vocab_size` is `len(tokenizer)`: ids below it are known. `special_tokens` are the template
    variables (`bos_token`, ...). `chat_template` is the default one.
    """

    json_text: str | None
    vocab_size: int
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


NO_TOKENIZER = TokenizerParts(None, 0, None, None, None, None)

# Strings that tell tokenizers apart: whitespace, digits, contractions, scripts, emoji, code, bytes.
CORPUS = (
    "", " ", "  ", "\n", "\n\n", "\t", " \n ", "a", " a", "a ", "Hello, world!",
    "hello   world", "  lead", "trail  ", "don't I'll they've we're it's HE'S", "don’t",
    "0", "7 8 9", "123456789", "a1b22c333", "x   12   34", "3.14159", "1,000,000",
    "v1.2.3-rc4", "٣٤٥ ४५६ ½ ² Ⅷ", "line one\nline two\r\nline three",
    "tab\tseparated\tvalues", "def f(x):\n    return x ** 2  # square\n",
    "if (a<=b && c!=d) { e->f[0]++; }", "{\"key\": [1, 2, null]}",
    "<html><body class='x'>&amp;</body></html>", "https://example.com/a?b=c&d=e#f",
    "user@example.org", "C:\\dir\\file", "Grüße aus Köln", "naïve café résumé",
    "cafe\u0301 e\u0301", "Привет, мир", "你好，世界", "こんにちは世界", "안녕하세요 세계",
    "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "🙂", "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋", "\u00a0nbsp\u2003em", "\u200bzero\ufeffwidth",
    "ALLCAPS MixedCase snake_case kebab-case", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "....!!!???", "▁underscored▁ ▁", "<s> </s> <unk> <pad> [INST] <0x0A>",
    "\x00\x01\x7f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﬁ ﬀ",
)  # fmt: skip


def tokenizer_parts(tokenizer: Any) -> TokenizerParts:
    """`tokenizer.json` text and facts of a transformers tokenizer, fast or convertible.

    Errors: UnsupportedError when it cannot be converted, or when the result does not encode and
    decode a built-in corpus exactly as transformers does (the message names the first string).
    """
    backend = _backend(tokenizer)
    try:
        json_text = backend.to_str()
    except Exception as error:  # the Rust side raises plain Exception for parts written in Python
        raise UnsupportedError(
            f"{type(tokenizer).__name__} cannot be written as tokenizer.json: {error}",
            hint="tokenizers with Python components cannot go into an engine",
        ) from error
    prove_equal(tokenizer, json_text)
    return TokenizerParts(
        json_text=json_text,
        vocab_size=len(tokenizer),
        chat_template=default_template(tokenizer.chat_template),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        special_tokens={
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if not isinstance(token, list)
        },
    )


def default_template(template: Any) -> str | None:
    """The chat template used when none is named: transformers holds one text or a dict by name."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _backend(tokenizer: Any) -> Tokenizer:
    if tokenizer.is_fast:
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    else:
        from transformers.convert_slow_tokenizer import convert_slow_tokenizer

        try:
            backend = convert_slow_tokenizer(tokenizer)
        except Exception as error:  # converters fail in as many ways as there are tokenizers
            raise UnsupportedError(
                f"{type(tokenizer).__name__} has no tokenizer.json and cannot be converted: {error}",
                hint="a checkpoint that comes with tokenizer.json is needed",
            ) from error
    backend.no_padding()  # both are settings of the last call, not of the vocabulary
    backend.no_truncation()
    return backend


def prove_equal(tokenizer: Any, json_text: str) -> None:
    """UnsupportedError unless `json_text` gives the ids and texts of `tokenizer` over the corpus."""
    ours = Tokenizer.from_str(json_text)
    for text in _corpus(tokenizer):
        for special in (True, False):
            want = tokenizer(text, add_special_tokens=special, truncation=False, padding=False)["input_ids"]
            got = ours.encode(text, add_special_tokens=special).ids
            if got != list(want):
                raise _mismatch(
                    tokenizer, f"encodes {text!r} (add_special_tokens={special})", got, list(want)
                )
        want_text = tokenizer.decode(want, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        got_text = ours.decode(got, skip_special_tokens=False)
        if got_text != want_text:
            raise _mismatch(tokenizer, f"decodes {got}", repr(got_text), repr(want_text))


def _corpus(tokenizer: Any) -> Iterator[str]:
    yield from CORPUS
    for token in tokenizer.all_special_tokens:
        yield f"a{token} b {token}\n"


def _mismatch(tokenizer: Any, what: str, got: Any, want: Any) -> UnsupportedError:
    return UnsupportedError(
        f"the tokenizer.json made from {type(tokenizer).__name__} {what} as {got}, transformers gives {want}",
        hint="this tokenizer's rules are partly in Python code and cannot go into an engine",
    )
