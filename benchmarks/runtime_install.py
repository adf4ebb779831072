"""What the runtime takes on a machine: bytes of its packages, seconds to import it.

    python benchmarks/runtime_install.py [--extra cuda] [--rounds 7]

Installs this checkout with the extra, and all that it needs, into an empty folder (pip's index is asked), and
imports `LLM` of `tapeout.runtime` from there in new processes, whose files are then in the page cache. Writes
`runtime_install.json`; its `calibration_us` is about 10 on a machine that nobody else uses (see record.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
_IMPORT = (
    "import time; start = time.perf_counter(); from tapeout.runtime import LLM, SamplingParams; "
    "print(time.perf_counter() - start); import sys; "
    "print(','.join(sorted({'torch', 'triton', 'transformers', 'onnx', 'tensorrt'} & set(sys.modules))))"
)


def installed(folder: Path, extra: str) -> dict[str, int]:
    """Bytes of every package, by the name of its folder; those of less than a megabyte in one sum."""
    requirement = f"{ROOT}[{extra}]" if extra else str(ROOT)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", str(folder), requirement]
    subprocess.run(pip, check=True)
    sizes: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(folder).parts[0]
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    large = {name: size for name, size in sizes.items() if size >= 1 << 20}
    return {**dict(sorted(large.items())), "others": sum(sizes.values()) - sum(large.values())}


def import_seconds(folder: Path, rounds: int) -> list[float]:
    """Of each round but the first, which compiles and reads."""
    times = []
    for _ in range(rounds + 1):
        output = subprocess.run(
            [sys.executable, "-S", "-c", _IMPORT],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)},
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert output[1:] in ([], [""]), f"the runtime imported {output[1]}"
        times.append(float(output[0]))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra", default="cuda", help="of pyproject.toml, or none (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "conditions": record.conditions(1),
        "settings": {"extra": args.extra, "rounds": args.rounds},
    }
    with tempfile.TemporaryDirectory() as name:
        sizes = installed(Path(name), args.extra)
        times = import_seconds(Path(name), args.rounds)
    result |= {
        "bytes": sum(sizes.values()),
        "bytes_by_package": sizes,
        "import_seconds": [round(t, 3) for t in times],
        "import_median_seconds": round(statistics.median(times), 3),
        "calibration_us": record.calibration_us(),
    }
    print(f"{result['bytes'] / 1e6:.0f} MB, import {result['import_median_seconds']} s")
    record.write("runtime_install", result)


if __name__ == "__main__":
    main()
