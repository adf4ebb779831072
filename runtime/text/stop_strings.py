"""Stop strings across token boundaries, with nothing of them leaking into the stream."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches streamed text for stop strings.

    The match that is complete first ends the text; of those complete at the same character, the
    one that starts first. So the result does not depend on how the text was cut into pieces.
    Text that may be the beginning of a stop string is held back until it is decided.

    Args:
        stop: non-empty strings. include: keep the matched string in the text.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, active: bool = True) -> str:
        """Text that may be shown now. After a match (`matched`) nothing more is shown.

        With `active` False (below min_tokens) stop strings neither match nor start in `piece`.
        """
        if self.matched is not None:
            return ""
        text, self._held = self._held + piece, ""
        if not self._stop or not active:
            return text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            return text[: end if self._include else start]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back text, when the output ends without a match."""
        text, self._held = self._held, ""
        return text if self.matched is None else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
