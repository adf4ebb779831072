"""What a user sees of building SmolLM2 with the installed command, and what it leaves."""

from __future__ import annotations

import json
import re
from typing import Any

from tapeout.cli.format import human_bytes

MIB = 1 << 20


def test_the_last_lines_tell_files_seconds_and_memory(smollm2_build: Any) -> None:
    assert smollm2_build.code == 0, smollm2_build.stderr
    size = human_bytes(smollm2_build.engine.stat().st_size)
    parity, wrote, file, cost = smollm2_build.stdout.splitlines()[-4:]
    assert (parity, wrote, file) == ("parity: passed", "wrote", f"  fp32.engine  {size}")
    assert re.fullmatch(r"\d+\.\d s, peak memory [\d.]+ (MiB|GiB)", cost)


def test_every_stage_is_told_with_its_seconds(smollm2_build: Any) -> None:
    lines = smollm2_build.stderr.splitlines()
    for stage in ("config", "trace", "passes", "tactics", "write", "parity"):
        assert any(re.match(rf"{stage} +\d+\.\d+ s  ", line) for line in lines), stage
    assert "\r" not in smollm2_build.stderr
    assert "\x1b" not in smollm2_build.stderr


def test_the_report_holds_the_figures(smollm2_build: Any) -> None:
    report = json.loads(smollm2_build.engine.with_name("fp32.engine.report.json").read_text())
    assert report["file_bytes"] == {"fp32.engine": smollm2_build.engine.stat().st_size}
    parity = report["parity"]
    assert (parity["verdict"], parity["top1_match"]) == ("passed", 1.0)
    assert 0 < parity["max_logit_difference"] < 0.01
    assert set(report["passes"]) >= {"fuse_rms_norm", "fuse_rope", "merge_qkv", "page_attention"}
    assert report["timed"]
    assert all(timing["tactic"] for timing in report["tactics"])


def test_memory_stays_within_its_bound(smollm2_build: Any) -> None:
    """Twice the largest fused tensor and 2 GB (DESIGN.md 5)."""
    report = json.loads(smollm2_build.engine.with_name("fp32.engine.report.json").read_text())
    largest = 49152 * 576 * 4
    assert report["peak_memory_bytes"] < 2 * largest + 2_000_000_000


def test_nothing_else_is_left_behind(smollm2_build: Any) -> None:
    names = {path.name for path in smollm2_build.engine.parent.iterdir() if "fp32" in path.name}
    assert names == {"fp32.engine", "fp32.engine.report.json"}
