"""What one block of a compiled kernel occupies, as the assembler reports it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from tapeout.plugins.errors import TapeoutError
from tapeout.plugins.triton_aot.compile import CompiledKernel


@dataclass(frozen=True)
class KernelResources:
    """Registers and local memory of one thread.

    Attributes:
        registers: per thread. stack_bytes: local memory per thread; spilled registers show here.
    """

    registers: int
    stack_bytes: int


def kernel_resources(kernel: CompiledKernel) -> KernelResources:
    """Read them from the cubin, by a process of its own; an engine needs none of it.

    Raises TapeoutError for a cubin that says nothing of the kernel.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    match = re.search(rf"Function {re.escape(kernel.symbol)}:\s*REG:(\d+) STACK:(\d+)", done.stdout)
    if match is None:
        raise TapeoutError(f"cuobjdump reported no resources of {kernel.symbol}: {done.stdout}{done.stderr}")
    return KernelResources(int(match[1]), int(match[2]))
