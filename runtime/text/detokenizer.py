"""Incremental detokenization that never shows half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so at most three bytes of one can be waiting for the
# rest: one replacement character each (byte fallback) or one for all (byte level).
_MOST_PARTIAL = 3
_WINDOW_TOKENS = 64


class Detokenizer:
    """Turns ids into text one at a time; the pieces join to `decode(all ids)`.

    Only a window of recent ids is decoded each time. It starts at a place where the text was
    whole and includes at least one visible token from before, because decoders treat the first
    token of a text differently (a leading space is stripped). Text that ends in replacement
    characters is held back, as it may be the beginning of a character; `flush` gives it out.

    Where the ids hold bytes that are no UTF-8, a byte-fallback decoder replaces whole runs of
    bytes including characters already given out; the stream then shows the bad bytes as
    replacement characters and keeps what it gave out.

    Args:
        decode: ids to text, for example `Tokenizer.decode`.
        byte_fallback: bytes that are no UTF-8 are replaced in runs, as described above.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, byte_fallback: bool = True) -> None:
        self._decode = decode
        self._byte_fallback = byte_fallback
        self._ids: list[int] = []  # the window
        self._boundary = 0  # window index up to which text was whole when last given out
        self._given = ""  # text of the window that has been given out
        self._text = ""  # text of the whole window
        self._slide_is_due = False

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; often "" in the middle of a character."""
        self._slide()
        self._ids.append(token_id)
        self._text = self._decode(self._ids)
        if not self._text.startswith(self._given):
            self._restart()
        return self._give(_without_partial(self._text))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these ids: what pushing one after the other gives, decoded at once.

        Only where that is sure to be the same: the text must be whole after the last id, and must not
        hold bytes whose meaning depends on how many were decoded together. Otherwise halves are tried.
        """
        if len(token_ids) < 2:
            return "".join(map(self.push, token_ids))
        self._slide()
        text = self._decode([*self._ids, *token_ids])
        doubtful = text.endswith(_REPLACEMENT) or (self._byte_fallback and _REPLACEMENT in text)
        if text.startswith(self._given) and not doubtful:
            self._ids += token_ids
            self._text = text
            return self._give(text)
        half = len(token_ids) // 2
        return self.push_all(token_ids[:half]) + self.push_all(token_ids[half:])

    def flush(self) -> str:
        """The held-back rest, once, at the end of the output."""
        piece = self._text[len(self._given) :]
        self._given = self._text
        return piece

    def _give(self, certain: str) -> str:
        """What is new in `certain`, the window's text without a partial character at its end."""
        piece = certain[len(self._given) :]
        if piece:
            self._given = certain
        if len(certain) == len(self._text) and piece:
            self._slide_is_due = True
        elif len(self._ids) > _WINDOW_TOKENS:
            self._shorten()
        return piece

    def _slide(self) -> None:
        """Start the window at the boundary before the last one: ids that gave visible text.

        Left until the next id, because the last slide of an output would be for nothing.
        """
        if not self._slide_is_due:
            return
        self._slide_is_due = False
        del self._ids[: self._boundary]
        self._boundary = len(self._ids)
        self._text = self._decode(self._ids)
        self._given = self._text

    def _restart(self) -> None:
        """The decoder changed text already given out: go on with the ids after it alone."""
        del self._ids[: self._boundary]
        self._boundary = 0
        self._given = ""
        self._text = self._decode(self._ids)

    def _shorten(self) -> None:
        """Bound the work where the text is not whole or not visible for long (invalid bytes)."""
        del self._ids[self._boundary : -_MOST_PARTIAL - 1]
        self._text = self._decode(self._ids)
        self._given = _without_partial(self._text)


def _without_partial(text: str) -> str:
    """The text without up to three replacement characters at its end."""
    end = len(text)
    while end > 0 and len(text) - end < _MOST_PARTIAL and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]
