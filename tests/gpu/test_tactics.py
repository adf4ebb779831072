"""Every tactic of a small model, not only those an engine has chosen, is right on this GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_bundle import DTYPES, Bundle


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_candidate_fails_its_check(
    bundle: Bundle, tapeout: Callable[..., Any], report: Callable[[str], None], tmp_path: Path, dtype: str
) -> None:
    """`tapeout time` checks the reference against torch's values, then candidates against the reference."""
    cache = tmp_path / "cache.json"
    done = tapeout("time", bundle.path(f"{dtype}.pack"), "-o", cache, "--json", timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # A provider whose library this machine lacks (pip install nvidia-cublas) is no failure.
    absent = [item for item in found["lost"] if item["reason"] == "libcublasLt was not found"]
    lost = [
        f"{item['tactic']} of {item['entry']}: {item['reason']}"
        for item in found["lost"]
        if item not in absent
    ]
    products = [e["times_us"]["cublaslt"] for e in found["entries"] if "cublaslt" in e["times_us"]]
    report(
        f"{dtype} pack: {found['timed']} of {found['candidates']} candidates timed, "
        f"{found['restarts']} restarts, {found['seconds']:.1f} s; {len(products)} by cuBLASLt, which is "
        f"{'absent' if absent else 'there'}"
    )
    assert lost == []
    assert found["skipped"] == {}
    assert found["timed"] == found["candidates"] - len(absent) > 100
    assert {entry["kind"] for entry in found["entries"]} == {"mixed", "decode"}
