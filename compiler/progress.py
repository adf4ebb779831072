"""How a build tells somebody what it is doing, without knowing who listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

#: Between two lines about one stage in a log.
DETAIL_SECONDS = 10.0


class Stage(Protocol):
    """A stage under way."""

    def update(self, text: str) -> None:
        """Replace the stage's detail, for example `37 of 210 weights`."""


def of_bytes(stage: Stage) -> Callable[[int, int], None]:
    """A listener for (bytes done, bytes in all) that shows them as the stage's detail."""
    return lambda done, total: stage.update(f"{done / total:.0%} of {total:,} bytes")


def of_kernels(update: Callable[[str], None]) -> Callable[[int, int], None]:
    """A listener for (kernels done, kernels in all) that shows them as a stage's detail."""
    return lambda done, total: update(f"{done} of {total} kernels compiled")


class PacedDetail:
    """A stage's detail where every telling stays, as in a log: told again when it has changed and the last
    telling is `DETAIL_SECONDS` ago."""

    def __init__(
        self, detail: str, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`detail` is what the reader knows from the stage's start; `clock` gives seconds."""
        self._told, self._tell, self._clock = detail, tell, clock
        self._at = clock()

    def update(self, text: str) -> None:
        now = self._clock()
        if text != self._told and now - self._at >= DETAIL_SECONDS:
            self._told, self._at = text, now
            self._tell(text)


class Progress(Protocol):
    """Receives the stages of a build, one at a time and never nested."""

    def stage(self, name: str, detail: str = "") -> AbstractContextManager[Stage]:
        """Enter a stage; leaving the context ends it, an exception marks it failed."""

    def info(self, text: str) -> None:
        """A line worth reading that is neither a stage nor an error."""


class SilentProgress:
    """Says nothing: for `--json` and for callers that pass no progress."""

    def stage(self, name: str, detail: str = "") -> AbstractContextManager[Stage]:
        return nullcontext(self)

    def update(self, text: str) -> None:
        pass

    def info(self, text: str) -> None:
        pass
