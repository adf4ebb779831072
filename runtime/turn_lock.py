"""The lock around a loop: nothing that is done under it stops half-way because somebody pressed Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TurnLock:
    """A re-entrant lock; signals that come while the main thread has it take effect when it lets go.

    Python runs a signal's handler between any two instructions, and the KeyboardInterrupt that it raises
    would leave slots, pages or ids of a turn of the loop counted by halves. Only handlers written in Python
    are put off, and only the first signal of each kind: whoever sends it again is not kept waiting, be it
    because an executor hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of the main thread
        self._calls = 0  # of the main thread that keep the handlers in place
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, FrameType | None] = {}

    @contextmanager
    def many_turns(self) -> Iterator[None]:
        """Keep the handlers that put signals off from turn to turn: changing them takes system calls. Between
        two turns a signal takes effect at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._handlers:
            self._hold()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls and not self._depth:
                self._end_hold()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._lock.acquire()
            return
        if not self._handlers:
            self._hold()
        self._depth += 1
        try:
            self._lock.acquire()
        except BaseException:  # a second signal
            self._let_go()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            self._let_go()

    def _hold(self) -> None:
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:  # the other signal, a moment too early
            _restore(self._handlers)
            self._handlers = {}
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._depth or number in self._came:
            self._handlers[number](number, frame)
        else:
            self._came[number] = frame

    def _let_go(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        handlers = self._handlers
        came, self._came = self._came, {}
        if not self._calls:
            self._end_hold()
        for number, frame in came.items():
            handlers[number](number, frame)

    def _end_hold(self) -> None:
        handlers = self._handlers
        try:
            _restore(handlers)
        except BaseException:  # the one that came while the other was still put off
            _restore(handlers)
            raise
        finally:
            self._handlers = {}


def _restore(handlers: dict[int, Callable[[int, FrameType | None], Any]]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
