"""How every command ends: an exit code, and one message for each kind of failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

from tapeout.cli import streams
from tapeout.plugins.errors import (
    TRACEBACK_VARIABLE,
    CapacityError,
    EngineError,
    TapeoutError,
    UnsupportedError,
    UsageError,
    as_known,
)

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT and + SIGTERM, as shells report them

#: What to do about an error that does not say it itself; the first class that fits.
_HINTS: tuple[tuple[type[TapeoutError], str], ...] = (
    (EngineError, "copy or build the engine again"),
    (CapacityError, "lower the engine's limits or the KV cache; `build --dry-run` prints what is needed"),
    (UnsupportedError, "README.md says which models, dtypes and targets are supported"),
    (UsageError, "`tapeout --help` lists the commands, `tapeout COMMAND --help` their options"),
    (TapeoutError, f"set {TRACEBACK_VARIABLE}=1 to see where it came from"),
)


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what holds for Ctrl-C holds for it too."""


def end_on_sigterm() -> None:
    """Let SIGTERM raise `Terminated` in the main thread, so that temporary files are removed."""

    def end(number: int, frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would stop the cleaning up
        raise Terminated

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


class RootGroup(click.Group):
    """A click group that renders errors as `error: ...` and `hint: ...` on stderr."""

    def main(  # type: ignore[override]  # click overloads it on standalone_mode; it always exits here
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        extra["standalone_mode"] = False
        sys.exit(exit_code(lambda: super(RootGroup, self).main(args, prog_name, **extra)))


def exit_code(command: Callable[[], Any]) -> int:
    """Run a command and turn the way it ended into an exit code, printing what went wrong."""
    try:
        code = command()
        streams.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort) as error:
        # click makes an Abort of every KeyboardInterrupt.
        terminated = isinstance(error.__cause__ or error, Terminated)
        _tell("terminated" if terminated else "interrupted")
        return TERMINATED if terminated else INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        return 1
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            import traceback

            traceback.print_exc()
        known = explain(error)
        known.hint = known.hint or next(hint for kind, hint in _HINTS if isinstance(known, kind))
        _tell(f"error: {known.render()}")
        return known.exit_code
    finally:
        streams.discard_unwritten()


def _tell(text: str) -> None:
    with suppress(OSError):  # stderr may be full too
        click.echo(text, err=True)


def explain(error: Exception) -> TapeoutError:
    """The error as one of ours: message, hint and exit code."""
    if isinstance(error, click.ClickException):
        return _click_error(error)
    return as_known(error)


def _click_error(error: click.ClickException) -> TapeoutError:
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else None
    known = UsageError(error.format_message(), hint=hint)
    known.exit_code = error.exit_code
    return known
