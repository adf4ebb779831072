"""The real build process but for kernels, which are not compiled (see fake_kernels.py), and GPUs."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> int:
    from fake_kernels import compile_nothing

    from tapeout.compiler import cuda_plan
    from tapeout.compiler.matrix import run_job, worker
    from tapeout.compiler.tactics import gpu_pack
    from tapeout.runtime.executors.cuda import driver

    for module in (gpu_pack, cuda_plan):
        module.compile_all = compile_nothing  # type: ignore[attr-defined]
    run_job.compilers = lambda workers: nullcontext()  # type: ignore[assignment, attr-defined]
    driver.open_device = _no_device
    if doomed := os.environ.get("TEST_DOOMED"):
        real = run_job._make

        def make(task: Any, *rest: Any) -> Any:
            if task.title == doomed:
                os.abort()
            return real(task, *rest)

        run_job._make = make
    return worker.main()


def _no_device(ordinal: int = 0) -> Any:
    raise ImportError("this machine has no GPU")


if __name__ == "__main__":
    sys.exit(main())
