"""Packages that some commands take beyond the runtime's, and the extra that brings each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: Of commands that make weights.
_WEIGHTS = {"ml_dtypes": "weights", "gguf": "weights,gguf"}


@contextmanager
def weight_packages(command: str) -> Iterator[None]:
    """A package that is missing in here becomes a UsageError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _WEIGHTS:
            raise
        from tapeout.plugins.errors import UsageError

        raise UsageError(
            f"tapeout {command} needs {error.name} here, which is not installed",
            hint=f"pip install 'tapeout[{_WEIGHTS[error.name]}]'",
        ) from None
