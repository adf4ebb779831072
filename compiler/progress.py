"""How a build tells somebody what it is doing, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stage(Protocol):
    """A stage under way."""

    def update(self, text: str) -> None:
        """Replace the stage's detail, for example `37 of 210 weights`."""


def of_bytes(stage: Stage) -> Callable[[int, int], None]:
    """A listener for (bytes done, bytes in all) that shows them as the stage's detail."""
    return lambda done, total: stage.update(f"{done / total:.0%} of {total:,} bytes")


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
