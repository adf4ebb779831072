"""Every tactic of a small model, not only those an engine has chosen, is right on this GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_bundle import DTYPES, Bundle

from tapeout.runtime.tactic_timer.pack_file import read_pack

TOO_LARGE = "bytes of shared memory a block"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_candidate_fails_its_check(
    bundle: Bundle, tapeout: Callable[..., Any], report: Callable[[str], None], tmp_path: Path, dtype: str
) -> None:
    """`tapeout time` checks the reference against torch's values, then candidates against the reference."""
    path, cache = bundle.path(f"{dtype}.pack"), tmp_path / "cache.json"
    done = tapeout("time", path, "-o", cache, "--json", timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    pack = read_pack(path).pack
    candidates = [(entry, c) for entry in pack.entries for c in entry.candidates]
    # Known when the pack was made: these do not run anywhere.
    too_large = {(e.title(), c.tactic) for e, c in candidates if c.reason and TOO_LARGE in c.reason}
    # A provider whose library this machine lacks is no failure; one that does not start is.
    absent = [u for u in found["unavailable"] if u["reason"].startswith("libcublasLt was not found")]
    products = [e["times_us"]["cublaslt"] for e in found["entries"] if "cublaslt" in e["times_us"]]
    report(
        f"{dtype} pack: {found['timed']} of {found['candidates']} candidates timed, "
        f"{len(too_large)} are too large for the SM, {found['restarts']} restarts, {found['seconds']:.1f} s; "
        f"{len(products)} by cuBLASLt, {len(absent)} not for want of it; "
        + "; ".join(f"{s['kind']} {s['rows']}: {s['alone_us']} -> {s['time_us']} us" for s in found["steps"])
    )
    lost = [
        item
        for item in found["lost"]
        if (item["entry"], item["tactic"]) not in too_large and item not in absent
    ]
    assert [f"{item['tactic']} of {item['entry']}: {item['reason']}" for item in lost] == []
    assert found["skipped"] == {}
    assert found["timed"] == found["candidates"] - len(too_large) - len(absent) > 100
    steps = {(step["kind"], step["rows"]): step["time_us"] for step in found["steps"]}
    assert steps.keys() == {(step.kind, step.rows) for step in pack.steps} >= {("decode", 1), ("mixed", 1)}
    assert all(steps.values()), found["steps"]
    latent = [e for e in pack.entries if e.op == "paged_latent_attention"]
    alibi = [e for e in pack.entries if e.attrs.get("alibi")]
    assert {e.rows for e in latent} == {e.rows for e in alibi} == {1, 8, 128}
    assert all(len(e.candidates) > 1 for e in (*latent, *alibi))
    assert {entry["kind"] for entry in found["entries"]} == {"mixed", "decode"}
