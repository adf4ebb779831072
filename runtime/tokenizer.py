"""The engine's tokenizer: `tokenizers` plus the facts its file does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tapeout.plugins.errors import EngineCorruptError, UsageError
from tapeout.plugins.sample.params import surrogate_problem
from tapeout.runtime.engine.manifest import TokenizerFacts

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """Text to ids and back. `backend` is the `tokenizers.Tokenizer`, `facts` the manifest's.

    Raises:
        EngineCorruptError: the text is no tokenizer.json.
    """

    def __init__(self, tokenizer_json: str, facts: TokenizerFacts) -> None:
        from tokenizers import Tokenizer as Backend

        self.facts = facts
        try:
            self.backend: tokenizers.Tokenizer = Backend.from_str(tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise EngineCorruptError(
                f"the engine's text/tokenizer.json cannot be read: {error}", hint="build the engine again"
            ) from error
        # A file may carry limits for training; a prompt that is too long is refused, never cut.
        self.backend.no_truncation()
        self.backend.no_padding()
        #: Bytes that belong to no token are tokens of their own (Llama 2's kind); see `Detokenizer`.
        self.byte_fallback = "ByteFallback" in repr(self.backend.decoder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Chat text is encoded with add_special_tokens=False: its template wrote BOS.

        Raises:
            UsageError: the string is no Unicode text.
        """
        if (problem := surrogate_problem(text)) is not None:
            raise UsageError(f"the text {problem}", hint="remove lone surrogates such as '\\ud800'")
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids the tokenizer does not know give nothing."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one id on its own, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)
