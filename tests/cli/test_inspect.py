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

from tapeout.cli.engine_view import record_line
from tapeout.cli.main import cli
from tapeout.compiler.report import report_path
from tapeout.runtime.engine.program import Record, View


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
        "28 ids; eos [0]",
        "generation    max_new_tokens 200",
        "max-seq-len      256",
        "records   2\n  ops       embedding 1, select_rows 1",
        "KV pool   8.0 KiB for 4 requests of 256 tokens",
        "embedding(int32[T]; float32[28,28]) -> float32[T,28]  × 1\n    up to 64 rows aten",
        "no times: the report of this build does not lie beside the engine",
        "verdict  passed",
        "canonicalize  2 matches",
        "weights    3.1 KiB",
        "chat_template.jinja, tokenizer.json",
        "header verified; --verify reads the rest",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100
    assert "-> hidden" not in out
    assert "all verified" in ok(inspect(alphabet, "--verify"))


def test_records_are_listed_when_asked_for(alphabet: Path) -> None:
    out = ok(inspect(alphabet, "--program"))
    assert "0 embedding(token_ids:int32[T]) -> hidden:float32[T,28] @0 weights table" in out
    assert "1 select_rows(hidden:float32[T,28], row_ids:int32[R]) -> logits:float32[R,28] @7168" in out
    assert json.loads(ok(inspect(alphabet, "--program", "--json")))["program"]["listing"][0] in out


def test_windows_show_their_strides_and_offset() -> None:
    whole = View("%3", "float32", ("T", 2, 16), (32, 16, 1))
    window = View("%3", "float32", ("T", 2, 16), (128, 16, 1), 96)
    record = Record("mul", (whole, window), (), (whole,), {}, "")
    line = record_line(5, record, {"%3": 640})
    assert line == ("   5 mul(%3:float32[T,2,16], %3:float32[T,2,16|128,16,1|96]) -> %3:float32[T,2,16] @640")


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


SIGNATURE = "embedding(int32[T];float32[28,28])->float32[T,28]{}"


def write_report(engine: Path, **changes: object) -> list[dict[str, object]]:
    """A report as a build of `engine` writes it, reduced to what is shown; returns its timings."""
    sizes = json.loads(ok(inspect(engine, "--json")))["sizes"]
    losers = [{"native": 4.5}, {}, {"native": 1234.5}]
    timings: list[dict[str, object]] = [
        {"rows": rows, "tactic": "aten", "time_us": 3.25 * rows, "losers": others, "rejected": {}}
        for rows, others in zip((1, 8, 64), losers, strict=True)
    ]
    timings[1]["rejected"] = {"native": "NaN"}
    report = {
        "section_bytes": sizes,
        "parity": {"verdict": "passed", "cases": 3, "top1_match": 0.75},
        "tactics": [{"signature": SIGNATURE, **timing} for timing in timings],
        **changes,
    }
    report_path(engine).write_text(json.dumps(report))
    return timings


@pytest.fixture
def engine(alphabet: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged or given a report."""
    return Path(shutil.copy(alphabet, tmp_path / "a.engine"))


def test_times_come_from_the_report_beside_the_engine(engine: Path) -> None:
    timings = write_report(engine)
    out = ok(inspect(engine))
    assert "tactics (µs by rows, * chosen, from a.engine.report.json)" in out
    assert (
        "      rows        1       8      64\n"
        "      aten      3.2*   26.0*  208.0*\n"
        "      native    4.5       -    1234\n"
        "      native refused at 8 rows: NaN\n"
    ) in out
    assert "top1 match  0.75" in out
    data = json.loads(ok(inspect(engine, "--json")))
    assert [t["timings"] for t in data["tactics"]] == [timings, []]
    assert data["report"] == {"file": "a.engine.report.json", "parity": {"top1_match": 0.75}}


def test_many_anchors_fold(engine: Path) -> None:
    timing = {"signature": SIGNATURE, "tactic": "aten", "time_us": 99999.9}
    write_report(engine, tactics=[{**timing, "rows": 1 << i} for i in range(13)])
    out = ok(inspect(engine))
    assert max(map(len, out.splitlines())) <= 100
    assert out.count("100000*") == 13
    assert [line.split() for line in out.splitlines() if line.startswith("      rows")] == [
        ["rows", *(str(1 << i) for i in range(10))],
        ["rows", *(str(1 << i) for i in range(10, 13))],
    ]


def test_a_report_of_another_build_is_not_shown(engine: Path) -> None:
    write_report(engine, section_bytes={"total": 1})
    assert "no times: the report of this build does not lie beside the engine" in ok(inspect(engine))
    assert json.loads(ok(inspect(engine, "--json")))["report"] is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tactics": [1]}', "\xff"])
def test_a_report_that_cannot_be_read_is_no_report(engine: Path, text: str) -> None:
    report_path(engine).write_bytes(text.encode("latin-1"))
    assert "no times: the report of this build" in ok(inspect(engine))


def test_what_is_no_engine_is_refused(engine: Path, tmp_path: Path) -> None:
    data = engine.read_bytes()
    engine.write_bytes(data[: len(data) // 2])
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").write_bytes(b"PK\3\4" * 99)
    (tmp_path / "other.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name, code, words in (
        ("a.engine", 3, "truncated"),
        ("foreign", 3, "not a tapeout engine"),
        ("other.safetensors", 3, "not a tapeout engine"),
        ("missing", 2, "does not exist"),
        ("empty", 2, "is a directory"),
        (".", 3, "not all of its engines can be read"),
    ):
        for option in ("--json", "--verify", "--program"):
            result = inspect(tmp_path / name, option)
            assert (result.exit_code, result.stdout) == (code, ""), name
            assert result.stderr.startswith("error: ")
            assert words in result.stderr
            assert "hint: " in result.stderr


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


def test_an_engine_without_its_graph_gives_no_onnx(engine: Path) -> None:
    result = inspect(engine, "--onnx", str(engine.with_name("a.onnx")))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "holds no graph" in result.stderr
    assert [p.name for p in engine.parent.iterdir()] == ["a.engine"]


def test_an_unverified_build_says_so(tmp_path: Path, write_engine: Callable[..., Path]) -> None:
    engine = write_engine(tmp_path / "a.engine", parity={"verdict": "skipped"}, timed=False)
    out = ok(inspect(engine))
    assert "verdict  skipped" in out
    assert "tactics (untimed)" in out


@pytest.mark.parametrize("link", [False, True])
def test_onnx_never_overwrites_the_engine(engine: Path, tmp_path: Path, link: bool) -> None:
    target = engine
    if link:
        target = tmp_path / "link.onnx"
        target.symlink_to(engine)
    before = engine.read_bytes()
    result = inspect(engine, "--onnx", str(target))
    assert result.exit_code == 2
    assert "would be overwritten" in result.stderr
    assert engine.read_bytes() == before
    assert inspect(engine, "--onnx", "/dev/null").exit_code == 2


def test_a_path_that_is_too_long_is_a_usage_error() -> None:
    result = inspect(Path("x" * 5000))
    assert result.exit_code == 2
    assert "File name too long" in result.stderr
