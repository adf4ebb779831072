"""Where, when and with what a measurement was made: part of every record."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tapeout.runtime.engine import Engine
from tapeout.runtime.executors import is_cuda

#: Packages that take part in running an engine; torch only in cpu engines.
_PACKAGES = ("tapeout", "numpy", "tokenizers", "torch", "cuda-bindings")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def conditions(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Date, commit, machine, versions, engine and settings of a run.

    The load average says whether others were busy. `commit` is that of the checkout this code stands
    in, None when it is installed without one.
    """
    manifest = engine.manifest
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": _machine(engine),
        "versions": {"python": platform.python_version(), **_versions(is_cuda(engine))},
        "engine": {
            "file": engine.path.name,
            "sha256": engine.digest,
            "target": manifest.target,
            "timed_tactics": manifest.timed,
            "limits": vars(manifest.limits),
            "model": vars(manifest.model),
            "weights": _weights_facts(engine),
            "tokenizer": manifest.tokenizer is not None,
            "built_with": dict(manifest.versions),
        },
        "settings": {name: value for name, value in settings.items() if value is not None},
    }


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _machine(engine: Engine) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
    }
    if is_cuda(engine):
        from tapeout.runtime.executors.cuda.driver import open_device

        gpu = open_device().facts
        facts["gpu"] = {"name": gpu.name, "sm": gpu.sm, "memory_bytes": gpu.total_bytes}
        facts["driver"] = _driver_version()
        facts["cuda_of_driver"] = f"{gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
    return facts


def _driver_version() -> str | None:
    """`580.159.04`; None where the kernel module does not tell."""
    try:
        words = _DRIVER_FILE.read_text().split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)


def _versions(cuda: bool) -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        if name == ("torch" if cuda else "cuda-bindings"):
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # tapeout run from a checkout that is not installed
    return found


def _weights_facts(engine: Engine) -> dict[str, Any]:
    facts = {k: v for k, v in engine.manifest.weights.items() if k in ("storage", "digest")}
    if engine.dummy_seed is not None:
        facts["random_seed"] = engine.dummy_seed
    return facts


def _commit() -> str | None:
    """Of the checkout that this file is part of, and of no other that it may be installed in."""
    top = Path(__file__).resolve().parents[2]
    if not (top / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
