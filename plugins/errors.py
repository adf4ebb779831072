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

import errno

#: Set to 1, it makes commands show where an error came from.
TRACEBACK_VARIABLE = "TAPEOUT_TRACEBACK"

#: Errors of a file system that takes no more.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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


def as_known(error: Exception) -> TapeoutError:
    """The error as one of ours: what a library raises gets a message, a hint and an exit code."""
    if isinstance(error, TapeoutError):
        return error
    # torch reports a failed allocation on a CPU as RuntimeError with this text.
    if isinstance(error, MemoryError) or "not enough memory" in str(error):
        return CapacityError(f"out of memory: {error}" if str(error) else "out of memory")
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("tapeout"):
        return TapeoutError(
            f"the Python package {error.name!r} is not installed",
            hint="pip install 'tapeout[build,cpu]' installs what building and running on a CPU need",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{error.filename}: {error.strerror}", hint="give a shorter path")
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return TapeoutError(f"{error.filename or 'an output'} cannot be written: {error.strerror}")
    text = " ".join(str(error).split()) or "no message"
    return TapeoutError(
        f"unexpected {type(error).__name__}: {text}",
        hint=f"set {TRACEBACK_VARIABLE}=1 to see where it came from",
    )
