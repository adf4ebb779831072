"""What this machine's CPU can do."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import UnsupportedError

_V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def _level(machine: str, flags: set[str]) -> str:
    if machine in ("aarch64", "arm64"):
        return "aarch64"
    if machine in ("x86_64", "AMD64"):
        for name, needed in (("x86_64_v4", _V4), ("x86_64_v3", _V3), ("x86_64_v2", _V2)):
            if needed <= flags:
                return name
    raise UnsupportedError(
        f"this CPU ({machine}) has none of the instruction sets kernels exist for",
        hint="x86-64 with SSE4.2 (2009 and later) or 64-bit ARM is needed",
    )


def _processors(text: str) -> list[dict[str, str]]:
    """/proc/cpuinfo as one dictionary a logical processor."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    pairs = [[line.partition(":") for line in block.splitlines() if ":" in line] for block in blocks]
    return [{key.strip(): value.strip() for key, _, value in block} for block in pairs]


def _threads(processors: list[dict[str, str]], allowed: set[int], omp_num_threads: str | None) -> int:
    """Physical cores among the allowed processors; OMP_NUM_THREADS wins when it is a number."""
    first = (omp_num_threads or "").split(",")[0].strip()
    if first.isdigit() and int(first) > 0:
        return int(first)
    cores = set()
    for p in processors:
        index = p.get("processor", "")
        if index.isdigit() and int(index) in allowed:
            cores.add((p.get("physical id"), p.get("core id", index)))
    return max(1, len(cores) or len(allowed))


def parse_host(machine: str, cpuinfo: str, allowed: set[int], omp_num_threads: str | None) -> HostCpu:
    """The HostCpu described by the text of /proc/cpuinfo and the processors a process may use."""
    processors = _processors(cpuinfo)
    flags = set(next((p["flags"] for p in processors if "flags" in p), "").split())
    return HostCpu(level=_level(machine, flags), threads=_threads(processors, allowed, omp_num_threads))


def detect_host() -> HostCpu:
    """The level and threads of the machine this runs on; raises UnsupportedError for another CPU."""
    return parse_host(
        platform.machine(),
        Path("/proc/cpuinfo").read_text(),
        os.sched_getaffinity(0),
        os.environ.get("OMP_NUM_THREADS"),
    )
