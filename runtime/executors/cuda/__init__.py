"""The executor of `cuda` engines. See README.md."""

from tapeout.runtime.executors.cuda.executor import CudaExecutor, device_memory_left

__all__ = ["CudaExecutor", "device_memory_left"]
