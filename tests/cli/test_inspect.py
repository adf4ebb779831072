"""`tapeout inspect` on a real engine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli
from tapeout.compiler.report import report_path


def inspect(engine: Path, *args: str) -> Result:
    return CliRunner().invoke(cli, ["inspect", str(engine), *args])


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_text_shows_every_part(alphabet: Path) -> None:
    out = ok(inspect(alphabet))
    for text in (
        "Alphabet, float32, quantize none",
        "max-seq-len      256",
        "records  2  (embedding 1, select_rows 1)",
        "up to 64 rows aten",
        "verdict  passed",
        "canonicalize  2 matches",
        "weights         3.1 KiB",
    ):
        assert text in out
    assert "verified" not in out
    assert "-> hidden" not in out


def test_records_are_listed_when_asked_for(alphabet: Path) -> None:
    out = ok(inspect(alphabet, "--program"))
    assert "0 embedding(token_ids:int32[T]) -> hidden:float32[T,28] weights table" in out


def test_json_is_one_document(alphabet: Path) -> None:
    data = json.loads(ok(inspect(alphabet, "--json", "--verify")))
    assert data["verified"] is True
    assert data["manifest"]["limits"]["max_batch_size"] == 4
    assert data["program"]["ops"] == {"embedding": 1, "select_rows": 1}
    assert data["sizes"]["total"] == alphabet.stat().st_size
    assert [t["ranges"] for t in data["tactics"]] == [
        [{"max_rows": 64, "tactic": "aten"}],
        [{"max_rows": 4, "tactic": "aten"}],
    ]
    assert len(data["digest"]) == 64


def test_times_come_from_the_report_beside_the_engine(alphabet: Path, tmp_path: Path) -> None:
    engine = tmp_path / "a.engine"
    shutil.copy(alphabet, engine)
    signature = json.loads(ok(inspect(engine, "--json")))["tactics"][0]["signature"]
    timing = {
        "rows": 8,
        "tactic": "aten",
        "median_us": 3.25,
        "losers": {"native": 4.5},
        "rejected": {"x": "NaN"},
    }
    report_path(engine).write_text(json.dumps({"tactics": [{"signature": signature, **timing}]}))
    assert "8 rows: aten 3.2 µs; native 4.5 µs; x refused: NaN" in ok(inspect(engine))
    assert json.loads(ok(inspect(engine, "--json")))["tactics"][0]["timings"] == [timing]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tactics": [1]}'])
def test_a_report_that_cannot_be_read_is_no_report(alphabet: Path, tmp_path: Path, text: str) -> None:
    engine = tmp_path / "a.engine"
    shutil.copy(alphabet, engine)
    report_path(engine).write_text(text)
    assert "aten" in ok(inspect(engine))


def test_verify_finds_one_flipped_bit_anywhere(alphabet: Path, tmp_path: Path) -> None:
    data = alphabet.read_bytes()
    engine = tmp_path / "a.engine"
    for place in range(8, len(data), len(data) // 40):
        engine.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        result = inspect(engine, "--verify")
        assert result.exit_code == 3, place
        assert result.stdout == ""


def test_onnx_is_written_by_the_compiler(
    alphabet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, Path]] = []
    module = ModuleType("tapeout.compiler.onnx_export")
    module.export_engine = lambda engine, out: calls.append((engine, out))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tapeout.compiler.onnx_export", module)
    out = tmp_path / "a.onnx"
    assert f"wrote {out}" in ok(inspect(alphabet, "--onnx", str(out)))
    assert calls == [(alphabet, out)]
    result = inspect(alphabet, "--onnx", str(tmp_path / "missing" / "a.onnx"))
    assert result.exit_code == 2
    assert len(calls) == 1


def test_an_unverified_build_says_so(tmp_path: Path, write_engine: Callable[..., Path]) -> None:
    engine = write_engine(tmp_path / "a.engine", parity={"verdict": "skipped"}, timed=False)
    out = ok(inspect(engine))
    assert "verdict  skipped" in out
    assert "tactics (untimed)" in out
