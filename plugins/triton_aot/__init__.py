"""Triton kernels compiled ahead of time to cubins, on any machine, for any listed SM.

Importing this package does not import Triton; compiling does.
"""

from tapeout.plugins.triton_aot.compile import SCRATCH_TYPES, CompiledKernel, compile_kernel
from tapeout.plugins.triton_aot.digest import kernel_digest
from tapeout.plugins.triton_aot.processes import compile_ahead, compile_all, compilers
from tapeout.plugins.triton_aot.resources import KernelResources, kernel_resources

__all__ = [
    "SCRATCH_TYPES",
    "CompiledKernel",
    "KernelResources",
    "compile_ahead",
    "compile_all",
    "compile_kernel",
    "compilers",
    "kernel_digest",
    "kernel_resources",
]
