"""Executor of `cpu` engines. Imports torch. See ../README.md."""

from tapeout.runtime.executors.cpu.executor import CpuExecutor

__all__ = ["CpuExecutor"]
