"""The `tapeout` command as ci/'s scripts find it in tests: no kernel is compiled, and a scripted GPU times.

The GPU says it is an H200; its times come from the names of tactics (see scripted_worker.py). The command of
build processes is in the environment, TEST_WORKER, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[1]


def main() -> None:
    from tapeout.cli.main import main as command
    from tapeout.compiler import time_into_cache
    from tapeout.compiler.matrix import build_matrix
    from tapeout.runtime.tactic_timer.session import time_pack

    scripted = TESTS / "runtime" / "tactic_timer" / "scripted_worker.py"
    time_into_cache.time_pack = partial(time_pack, worker=(sys.executable, str(scripted)))  # type: ignore[attr-defined]
    build_matrix.build_matrix.__kwdefaults__["worker"] = tuple(json.loads(os.environ["TEST_WORKER"]))
    command()


if __name__ == "__main__":
    main()
