"""Other weights for a running engine, between two steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from tapeout.plugins.errors import UsageError
from tapeout.plugins.sample.params import shown
from tapeout.runtime.engine import Engine
from tapeout.runtime.engine.replacement import open_replacement
from tapeout.runtime.llm_options import engine_path
from tapeout.runtime.loop import EngineLoop
from tapeout.runtime.turn_lock import TurnLock

logger = logging.getLogger("tapeout")

#: What may become of running requests; see `LLM.reload_weights`.
MODES = ("finish", "recompute", "abort")


class WeightReload:
    """Reloads one after the other. What a request has in the KV cache comes from the weights it began with,
    so nobody may run while they change.

    Args:
        loop: gives the loop. lock: what guards it. turn: drives it once.
    """

    def __init__(self, loop: Callable[[], EngineLoop], lock: TurnLock, turn: Callable[[], None]) -> None:
        self._loop, self._lock, self._turn = loop, lock, turn
        self._one_at_a_time = threading.Lock()

    def run(
        self,
        engine: Callable[[], Engine],
        path: str | os.PathLike[str],
        how: str,
        adopt: Callable[[Engine], None],
    ) -> None:
        """Replace the weights of `engine()` and close it; `adopt` is told the engine that runs from now on.

        Args:
            how: one of MODES.
            adopt: called under the lock, before anybody is admitted again.

        Raises: see `LLM.reload_weights`.
        """
        if how not in MODES:
            raise UsageError(f"running = {shown(how)}, expected one of {', '.join(MODES)}")
        with self._one_at_a_time:
            old = engine()
            replacement = open_replacement(old, engine_path(path))
            try:
                self._make_way(how)
                with self._lock:
                    self._loop().load_weights(replacement)
                    adopt(replacement)
            except BaseException:  # an interrupt may come when they run already
                (old if engine() is replacement else replacement).close()
                raise
            finally:
                with self._lock:
                    self._loop().hold_admissions(False)
            old.close()
        logger.info("the weights of %s run now", replacement.path)

    def _make_way(self, how: str) -> None:
        """Return when nobody runs; until admissions are allowed again, nobody will."""
        with self._lock:
            loop = self._loop()
            loop.hold_admissions(True)
            if how == "recompute":
                loop.pause_all()
            elif how == "abort":
                loop.abort_running()
        while not loop.is_vacant:
            self._turn()
