"""How long `tapeout refit` takes, with a checkpoint that is the engine's own with other values.

    python benchmarks/refit_cpu.py --engine FILE --model FILE.gguf [--rounds 3]

The fine-tune is the .gguf file the engine was built from, with the bytes of one matrix's blocks exchanged.
Every round is a new process and writes to files that were not there, so nothing is reused; `wall_s` is from
its start to its end, `cpu_s` the processor time of it and of the process that runs a step.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

from tapeout.model_defs.gguf_file import read_gguf
from tapeout.plugins.native import detect_host
from tapeout.runtime.engine import open_engine

CODE = "from tapeout.cli.main import main; main()"


def fine_tune(model: Path, path: Path) -> None:
    """A copy of a GGUF file in which the blocks of one matrix are rotated: valid values in other places."""
    shutil.copy(model, path)
    tensor = next(t for name, t in read_gguf(model).tensors.items() if name.endswith("ffn_up.weight"))
    block = tensor.nbytes // 64 // 20 * 20  # whole Q4_1 blocks of 20 bytes
    with path.open("r+b") as file:
        file.seek(tensor.start)
        data = file.read(tensor.nbytes)
        file.seek(tensor.start)
        file.write(data[block:] + data[:block])


def one_round(engine: Path, tuned: Path, folder: Path) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-c", CODE, "refit", engine, "--weights", tuned, "-o", folder / "out.engine"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.engine.parent) as name:
        tuned = Path(name) / "tuned.gguf"
        fine_tune(args.model, tuned)
        for n in range(args.rounds):
            folder = Path(name) / str(n)
            folder.mkdir()
            rounds.append(one_round(args.engine, tuned, folder))
            print(rounds[-1], flush=True)
            shutil.rmtree(folder)
    with open_engine(args.engine, verify=False) as engine:
        facts = {
            "model_type": engine.manifest.model.model_type,
            "dtype": engine.manifest.model.dtype,
            "weights": engine.manifest.weights["storage"],
            "weights_bytes": engine.weights_bytes,
        }
    record.write(
        "refit_cpu",
        {
            "what": "seconds of `tapeout refit` with a checkpoint of other values, a new process a round",
            "conditions": record.conditions(detect_host().threads),
            "engine": facts,
            "median": {k: statistics.median(r[k] for r in rounds) for k in ("wall_s", "cpu_s")},
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
