"""A build process of a matrix: takes a job from stdin, tells what becomes of it, ends with its parent.

Started as `python -m tapeout.compiler.matrix.worker FD`; events go to the file descriptor FD. Nothing heavy
is imported at the top: processes that compile kernels import this module too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from tapeout.compiler.matrix.job import Event, parse_job

INTERRUPTED = 130


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    job = parse_job(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as stream:

        def tell(event: Event) -> None:
            with suppress(OSError):  # the parent is gone; so is this process, in a moment
                stream.write(event.line())

        try:
            from tapeout.compiler.matrix.run_job import run_job

            run_job(job, tell)
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


def _interrupt(number: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would stop the cleaning up
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """The parent holds stdin open for as long as it lives."""
    with suppress(OSError, ValueError):
        while sys.stdin.buffer.read(1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
