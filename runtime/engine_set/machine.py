"""What this machine is, as far as choosing an engine goes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from tapeout.plugins.errors import EngineIncompatibleError, UnsupportedError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine.target import GpuFacts

logger = logging.getLogger("tapeout")

#: There where NVIDIA's kernel driver is loaded.
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """The GPU that engines run on (number 0; CUDA_VISIBLE_DEVICES decides which that is), and the CPU.

    Attributes:
        gpu: None where there is none, where its driver or cuda-bindings is missing, or where nobody asked.
        cpu_level: such as `x86_64_v3`; None for a CPU that has no kernels.
        no_gpu: why `gpu` is None; empty when it is not.
    """

    gpu: GpuFacts | None
    cpu_level: str | None
    no_gpu: str = ""

    def text(self) -> str:
        """The machine in a few words, for messages."""
        cpu = f"cpu:{self.cpu_level}" if self.cpu_level else "a CPU without kernels"
        if self.gpu is not None:
            return f"{self.gpu.name} (sm_{self.gpu.sm}), {cpu}"
        return f"{cpu}, no GPU{f' ({self.no_gpu})' if self.no_gpu else ''}"


def this_machine(*, look_for_gpu: bool = True) -> Machine:
    """The machine this runs on. Looking for a GPU starts its driver, which takes some 0.1 s."""
    try:
        level: str | None = detect_host().level
    except UnsupportedError:
        level = None
    if not look_for_gpu:
        return Machine(None, level)
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        if _DRIVER_FILE.exists():
            logger.warning(
                "this machine has an NVIDIA driver, but cuda-bindings is not installed: its GPU is left out "
                "(pip install 'tapeout[cuda]')"
            )
        return Machine(None, level, "cuda-bindings is not installed")
    from tapeout.runtime.executors.cuda.driver import open_device

    try:
        return Machine(open_device(0).facts, level)
    except EngineIncompatibleError as error:
        return Machine(None, level, error.message)
