"""Every error tapeout raises on purpose.

It lives in the lowest layer so that all others can raise it. Exit codes are the
`tapeout` command's; an error that is none of these exits with 1.

    TapeoutError                       1
    ├── UsageError                     2   an argument, option, path or request is wrong
    ├── EngineError                    3   this engine cannot be used
    │   ├── EngineCorruptError         3   truncated, or bytes differ from their checksum
    │   └── EngineIncompatibleError    3   other format version, target or machine
    ├── CapacityError                  4   not enough memory
    └── UnsupportedError               5   model, dtype, target or op that is not supported
"""

from __future__ import annotations


class TapeoutError(Exception):
    """An error with a message for the user and a hint what to do about it.

    `message` says what is wrong (with the value), what was expected and where;
    several offenders stand on lines of their own. `hint` is one sentence.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """The text printed for users: the message, then `hint: ...`."""
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(TapeoutError):
    exit_code = 2


class EngineError(TapeoutError):
    exit_code = 3


class EngineCorruptError(EngineError):
    pass


class EngineIncompatibleError(EngineError):
    pass


class CapacityError(TapeoutError):
    exit_code = 4


class UnsupportedError(TapeoutError):
    exit_code = 5
