#!/usr/bin/env python3
"""Stage 2, on a machine with a GPU: time the packs of its target. Needs `pip install ".[cuda]"` and no more.

ci/time.py gpus PACKS                         targets that have packs, as a JSON list: ["h200", "sm_90"]
ci/time.py run PACKS TIMINGS TARGET           PACKS/<model>/<engine>.pack -> TIMINGS/<model>/<engine>.json
    --earlier EARLIER                         with what EARLIER/<model>/<engine>.json knows, of the same GPU

A pack holds what the timings so far do not answer, so those must stay: what TIMINGS or else EARLIER holds is
in the file that is written, and what is measured now stands over it. Timings of another GPU are refused.
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
    notes = {pack: pack.with_name(pack.name + NOTE) for pack in sorted(folder.glob("*/*.pack"))}
    return {pack: target_of(note) for pack, note in notes.items() if note.is_file()}


def target_of(note: Path) -> str:
    """The target that a note is about, without `cuda:`; ends the program for what is no note."""
    try:
        target: str = json.loads(note.read_text())["factors"]["target"]
        return target.removeprefix("cuda:")
    except (ValueError, KeyError, TypeError, AttributeError):
        sys.exit(
            f"error: {note} is not what `tapeout build --stage compile` notes\nhint: compile the packs again"
        )


def run(folder: Path, timings: Path, target: str, earlier: Path | None = None) -> int:
    """Time every pack of the target; the exit code of the first that failed, after all were tried."""
    mine = [pack for pack, name in packs(folder).items() if name == target]
    if not mine:
        there = ", ".join(gpus(folder)) or "none at all"
        print(
            f"error: {folder} holds no pack for {target}; packs that are there: {there}\n"
            "hint: ci/compile.sh writes OUT/packs, for targets whose timings are not there",
            file=sys.stderr,
        )
        return 2
    for where in (timings, earlier):
        if where is not None and where.exists() and not where.is_dir():
            print(f"error: {where} is a file, expected a folder of timings", file=sys.stderr)
            return 2
    failed = 0
    for pack in mine:
        cache = timings / pack.parent.name / f"{pack.stem}.json"
        cache.parent.mkdir(parents=True, exist_ok=True)
        print(f"{pack} -> {cache}", flush=True)
        command = ["tapeout", "time", str(pack), "-o", str(cache)]
        known = cache if earlier is None or cache.exists() else earlier / pack.parent.name / cache.name
        if earlier is not None and not known.exists():  # nothing was timed so far, or it is the wrong folder
            print(f"note: there is no {known}: the timing cache gets what the pack holds alone", flush=True)
        if known.exists():
            command += ["--timing-cache", str(known)]
        code = subprocess.run(command, check=False).returncode
        failed = failed or code
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
    timing.add_argument("--earlier", type=Path)
    given = parser.parse_args()
    if given.command == "gpus":
        print(json.dumps(gpus(given.packs)))
        return 0
    return run(given.packs, given.timings, given.target, given.earlier)


if __name__ == "__main__":
    sys.exit(main())
