#!/usr/bin/env python3
"""Stage 2, on a machine with a GPU: time the packs of its target. Needs `pip install ".[cuda]"` and no more.

ci/time.py gpus PACKS                         targets that have packs, as a JSON list: ["h200", "sm_90"]
ci/time.py run PACKS TIMINGS TARGET           PACKS/<model>/<engine>.pack -> TIMINGS/<model>/<engine>.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

NOTE = ".key.json"  # what `tapeout build --stage compile` notes beside a pack


def packs(folder: Path) -> dict[Path, str]:
    """Target without `cuda:` by pack; a pack without its note, or a note without its pack, is none."""
    found = {}
    for pack in sorted(folder.glob("*/*.pack")):
        note = pack.with_name(pack.name + NOTE)
        found[pack] = json.loads(note.read_text())["factors"]["target"].removeprefix("cuda:")
    return found


def run(folder: Path, timings: Path, target: str) -> int:
    """Time every pack of the target; the exit code of the first that failed, after all were tried."""
    mine = [pack for pack, name in packs(folder).items() if name == target]
    if not mine:
        print(f"error: {folder} holds no pack for {target}, expected some of {gpus(folder)}", file=sys.stderr)
        return 2
    failed = 0
    for pack in mine:
        cache = timings / pack.parent.name / f"{pack.stem}.json"
        cache.parent.mkdir(parents=True, exist_ok=True)
        print(f"{pack} -> {cache}", flush=True)
        failed = (
            failed or subprocess.run(["tapeout", "time", str(pack), "-o", str(cache)], check=False).returncode
        )
    return failed


def gpus(folder: Path) -> list[str]:
    return sorted(set(packs(folder).values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    listing = commands.add_parser("gpus")
    timing = commands.add_parser("run")
    for command in (listing, timing):
        command.add_argument("packs", type=Path)
    timing.add_argument("timings", type=Path)
    timing.add_argument("target", type=lambda text: text.removeprefix("cuda:"))
    given = parser.parse_args()
    if given.command == "gpus":
        print(json.dumps(gpus(given.packs)))
        return 0
    return run(given.packs, given.timings, given.target)


if __name__ == "__main__":
    sys.exit(main())
