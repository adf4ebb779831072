"""Regions with real numbers: our kernels in a row, in Triton's interpreter, against the segment's ONNX model.

The model is executed by ONNX Runtime where TensorRT would run it: no segment has been executed on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[dev]'")


def told(*arguments: str) -> list[dict[str, Any]]:
    """Messages of the worker, by event `region`; the last one is the end."""
    here = Path(__file__).parent
    fakes = [here, *(here.parents[1] / f for f in ("runtime/executors", "plugins", "compiler"))]
    paths = [*map(str, fakes), *filter(None, sys.path)]  # the package as this process found it
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "interpreted_region.py", *arguments],
        cwd=here, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert messages[-1]["event"] == "end"
    assert not any(messages[-1]["open"].values())
    return messages


def test_what_is_wrong_is_seen_and_what_is_right_is_timed() -> None:
    """In a bucket of 8 with 5 rows, of which 4 are asked for; rows of the result are padded from 40 to 48."""
    messages = told("mixed", "right", "wrong", "unwritten", "outside")
    right, wrong, unwritten, outside = (m for m in messages if m["event"] == "region")
    assert (right["time_us"], "reason" in right) == (50.0, False)
    assert right["own_us"] > 5 * 100.0  # every op has a launch, and every block takes 100
    assert wrong["reason"].startswith("output x8: 1 of 160 elements differ, by at most")
    assert unwritten["reason"] == "output x8: 1 of 160 elements are NaN or were not written"
    assert outside["reason"] == "output x8: 1 elements outside its rows were written"
    phases = [m["phase"] for m in messages if m["event"] == "begin"]
    assert phases == ["load", "reference", "check", "time", *["load", "reference", "check"] * 3]


def test_a_step_that_only_decodes() -> None:
    """All rows are logit rows there."""
    (region,) = [m for m in told("decode", "right") if m["event"] == "region"]
    assert region["time_us"] == 50.0
