"""Progress of a build on stderr: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from tapeout.cli.streams import is_terminal
from tapeout.compiler.progress import PacedDetail, Progress, SilentProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


def choose_progress(*, silent: bool) -> Progress:
    """Silent when asked, rich on a terminal that has it, plain lines otherwise."""
    if silent:
        return SilentProgress()
    if is_terminal(sys.stderr):
        try:
            from rich.console import Console
        except ImportError:
            return PlainProgress()
        return RichProgress(Console(stderr=True, highlight=False))
    return PlainProgress()


class _Line:
    """The detail of the stage under way, for its last line."""

    def __init__(self, detail: str) -> None:
        self.detail = detail

    def update(self, text: str) -> None:
        self.detail = text

    def finish(self, name: str, seconds: float) -> str:
        return f"{name:<12} {seconds:7.2f} s  {self.detail}".rstrip()


class _PacedLine(_Line):
    def __init__(self, name: str, detail: str, clock: Callable[[], float]) -> None:
        super().__init__(detail)
        self._paced = PacedDetail(detail, lambda text: click.echo(f"{name} ... {text}", err=True), clock)

    def update(self, text: str) -> None:
        super().update(text)
        self._paced.update(text)


class PlainProgress:
    """A line when a stage starts, one when it ends, and from time to time its detail in between: readable in
    the log of a build that is under way or was killed."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[_Line]:
        click.echo(f"{name} ... {detail}".rstrip(), err=True)
        line, start = _PacedLine(name, detail, self._clock), self._clock()
        try:
            yield line
        except BaseException:
            click.echo(f"{name} failed", err=True)
            raise
        click.echo(line.finish(name, self._clock() - start), err=True)

    def info(self, text: str) -> None:
        click.echo(text, err=True)


class _LiveLine(_Line):
    def __init__(self, name: str, detail: str, status: Status) -> None:
        super().__init__(detail)
        self.name, self.status = name, status

    def update(self, text: str) -> None:
        from rich.markup import escape

        super().update(text)
        self.status.update(f"{self.name} [dim]{escape(text)}[/dim]")


class RichProgress:
    """A spinner for the stage under way, a line for each one done."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[_Line]:
        start = time.perf_counter()
        try:
            with self.console.status(name) as status:
                line = _LiveLine(name, detail, status)
                line.update(detail)
                yield line
        except BaseException:
            self.console.print(f"[red]✗[/red] {name}")
            raise
        self.console.print("[green]✓[/green]", end=" ")
        self.console.print(line.finish(name, time.perf_counter() - start), markup=False)

    def info(self, text: str) -> None:
        self.console.print(text, markup=False)
