"""`tapeout run` on a real engine: text, JSON lines, options, failures."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tapeout.cli.main import cli

Write = Callable[..., Path]
TAPEOUT = str(Path(sys.executable).with_name("tapeout"))


@pytest.fixture
def run(alphabet: Path) -> Callable[..., Result]:
    def call(*args: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, ["run", str(alphabet), *args], input=stdin)

    return call


def ok(result: Result) -> Result:
    assert result.exit_code == 0, result.stderr
    return result


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_prints_only_the_answer(run: Callable[..., Result]) -> None:
    result = ok(run("--prompt", "uvw"))
    assert result.stdout == "xyz\n"
    assert result.stderr == ""


def test_several_prompts_come_in_order_under_headers(run: Callable[..., Result]) -> None:
    prompts = ["uvw", "x", "z", "abcd", "mno", "y"]  # more than the engine's batch of 4
    out = ok(run(*[arg for p in prompts for arg in ("--prompt", p)])).stdout.splitlines()
    assert out == [
        *("--- 1 of 6: uvw ---", "xyz"),
        *("--- 2 of 6: x ---", "yz"),
        *("--- 3 of 6: z ---", ""),
        *("--- 4 of 6: abcd ---", "efghijklmnopqrstuvwxyz"),
        *("--- 5 of 6: mno ---", "pqrstuvwxyz"),
        *("--- 6 of 6: y ---", "z"),
    ]


def test_the_prompt_may_come_from_a_pipe(run: Callable[..., Result]) -> None:
    assert ok(run(stdin="vw")).stdout == "xyz\n"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--max-tokens", "2"], "bc"),
        (["--max_tokens=2"], "bc"),
        (["--stop", "de"], "bc"),
        (["--stop", "zz", "--stop", "d"], "bc"),
        (["--stop-token-ids", "9,4"], "bc"),
        (["--stop-token-ids", "9", "--stop-token-ids", "4"], "bc"),
        (["--stop", "c", "--min-tokens", "3", "--max-tokens", "3"], "bcd"),
        (["--chunk-tokens", "1", "--max-batch-size", "1", "--max-num-tokens", "2", "--max-tokens", "1"], "b"),
        (["--kv-cache-tokens", "32", "--threads", "1", "--max-tokens", "1"], "b"),
    ],
)
def test_options_take_effect(run: Callable[..., Result], args: list[str], text: str) -> None:
    assert ok(run("--prompt", "a", *args)).stdout == text + "\n"


def test_ignore_eos_goes_on(run: Callable[..., Result]) -> None:
    (result,) = json_lines(ok(run("--prompt", "y", "--ignore-eos", "--max-tokens", "5", "--json")).stdout)
    assert (len(result["token_ids"]), result["finish_reason"]) == (5, "length")


def test_sampling_needs_only_a_temperature_and_a_seed_repeats_it(run: Callable[..., Result]) -> None:
    args = ["--prompt", "a", "--temperature", "9", "--ignore-eos", "--max-tokens", "20", "--json"]
    first, again = (json_lines(ok(run(*args, "--seed", "5")).stdout)[0] for _ in range(2))
    assert first["token_ids"] == again["token_ids"]
    assert first["seed"] == 5
    fresh = json_lines(ok(run(*args)).stdout)[0]
    assert fresh["seed"] is not None
    assert fresh["token_ids"] != first["token_ids"]


def test_penalties_and_filters_reach_the_sampler(run: Callable[..., Result]) -> None:
    args = ["--prompt", "ab", "--temperature", "1", "--max-tokens", "1", "--json"]
    for flags in (["--top-k", "1"], ["--top-p", "0.5"], ["--min-p", "0.5"]):
        assert json_lines(ok(run(*args, *flags)).stdout)[0]["text"] == "c"
    penalties = ["--repetition-penalty", "1.5", "--presence-penalty", "1", "--frequency-penalty", "1"]
    assert ok(run("--prompt", "ab", "--max-tokens", "3", *penalties)).stdout == "cde\n"


def test_chat_uses_the_engines_template(run: Callable[..., Result]) -> None:
    (result,) = json_lines(
        ok(run("--chat", "--system", "q", "--prompt", "ab", "--json", "--max-tokens", "1")).stdout
    )
    assert result["text"] == "c"
    assert result["usage"]["prompt_tokens"] == 4  # q, space, a, b


def test_json_lines_hold_everything(run: Callable[..., Result]) -> None:
    result = ok(run("--prompt", "x", "--prompt", "y", "--json", "--logprobs", "1"))
    first, second = json_lines(result.stdout)
    assert (first["prompt"], first["text"], first["token_ids"]) == ("x", "yz", [25, 26, 0])
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert first["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(first["logprobs"]) == 3
    assert first["logprobs"][0]["25"]["decoded_token"] == "y"
    assert first["cumulative_logprob"] == pytest.approx(
        sum(t[str(i)]["logprob"] for t, i in zip(first["logprobs"], first["token_ids"], strict=True))
    )
    assert first["metrics"]["time_to_first_token_seconds"] > 0
    assert second["text"] == "z"
    assert result.stderr == ""


def test_logprobs_as_text(run: Callable[..., Result]) -> None:
    lines = ok(run("--prompt", "a", "--max-tokens", "2", "--logprobs", "2")).stdout.splitlines()
    assert lines[0] == "bc"
    assert lines[1].startswith('"b" -0.0')
    assert '"<eos>"' in lines[1]
    assert len(lines) == 3


def test_a_file_of_requests_gives_a_file_of_results(run: Callable[..., Result], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "first", "prompt": "a", "max_tokens": 2},
        {"messages": [{"role": "user", "content": "x"}]},
        {"id": 3, "prompt_token_ids": [24], "stop": ["z"]},
    ]
    source.write_text("\n\n".join(map(json.dumps, lines)))
    result = ok(run("--input", str(source), "--output", str(target), "--max-tokens", "9"))
    assert (result.stdout, result.stderr) == ("", "")
    first, second, third = json_lines(target.read_text())
    assert (first["id"], first["text"], first["finish_reason"]) == ("first", "bc", "length")
    assert ("id" in second, second["text"]) == (False, "yz")
    assert (third["id"], third["text"], third["stop_reason"]) == (3, "y", "z")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_requests_from_standard_input(run: Callable[..., Result]) -> None:
    result = ok(run("--input", "-", stdin='{"prompt": "x"}\n{"prompt": "y"}\n'))
    assert [r["text"] for r in json_lines(result.stdout)] == ["yz", "z"]


def test_flags_hold_for_lines_that_do_not_say_otherwise(run: Callable[..., Result]) -> None:
    stdin = '{"prompt": "a"}\n{"prompt": "a", "max_tokens": 3}\n{"prompt": "a", "max_tokens": null}\n'
    result = ok(run("--input", "-", "--max-tokens", "1", stdin=stdin))
    assert [r["text"] for r in json_lines(result.stdout)] == ["b", "bcd", "b"]


def test_stats_go_to_stderr(run: Callable[..., Result]) -> None:
    result = ok(run("--prompt", "ab", "--stats"))
    assert result.stdout == "cdefghijklmnopqrstuvwxyz\n"
    for text in ("load: ", "time to first token: ", "tokens: 2 prompt, 25 output", "tokens/s"):
        assert text in result.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--prompt", "a", "--input", "-"], "--prompt and --input exclude each other"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--prompt", "a", "--json", "--output", "x"], "--json and --output exclude each other"),
        ([], "standard input is empty"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "a", "--temperature", "-1", "--top-p", "2"], "top_p = 2"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens = 0"),
        (["--prompt", "a", "--stop-token-ids", "1,x"], "'x', expected ids such as 1,2"),
        (["--prompt", "a", "--threads", "0"], "threads = 0"),
        (["--prompt", "a", "--threads", "100000"], "threads = 100000, but this machine has"),
        (["--prompt", "a", "--temperature", "1e-300"], "temperature = 1e-300"),
        (["--prompt", "a", "--repetition-penalty", "1e-39"], "repetition_penalty = 1e-39"),
        (["--prompt", "a", "--stop-token-ids", "9" * 5000], "expected ids such as 1,2"),
        (["--prompt", "a\udcff"], r"'a\udcff' is not UTF-8 text"),
        (["--prompt", "a", "--chat", "--system", "\ud800"], r"'\ud800' is not UTF-8 text"),
        (["--prompt", "a", "--output", "x" * 5000], "File name too long"),
        (["--prompt", "a", "--output", "/dev/null/x"], "cannot be written"),
        (["--prompt", "a", "--max-batch-size", "5"], "built for at most 4"),
        (["--prompt", "a", "--free-memory-fraction", "2"], "free_memory_fraction = 2"),
        (["--prompt", "a" * 256], "max_seq_len = 256"),
        (["--prompt", "a", "--prompt", "a" * 256], "prompt 2: it has 256 tokens"),
        (["--input", "missing.jsonl"], "cannot read 'missing.jsonl'"),
        (["--prompt", "a", "--output", "missing/out.jsonl"], "does not exist"),
    ],
)
def test_bad_usage(run: Callable[..., Result], args: list[str], expected: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "hint: " in result.stderr
    assert result.stdout == ""


def test_a_line_that_the_engine_cannot_run_is_named_by_its_place(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "a"}\n\n' + json.dumps({"prompt": "a" * 256}) + "\n", "utf-8")
    result = run("--input", str(lines))
    assert result.exit_code == 2
    assert f"{lines}:3: it has 256 tokens" in result.stderr


def test_bad_lines_stop_everything(run: Callable[..., Result], tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    stdin = '{"prompt": "x"}\n{"prompt": "y", "temprature": 1}\n{}\n'
    result = run("--input", "-", "--output", str(target), stdin=stdin)
    assert result.exit_code == 2
    assert "-:2: unknown field 'temprature', did you mean 'temperature'?" in result.stderr
    assert "-:3: found no prompt" in result.stderr
    assert not target.exists()


def test_input_that_is_not_utf8(run: Callable[..., Result]) -> None:
    result = run("--input", "-", stdin=b'{"prompt": "\xff"}')
    assert result.exit_code == 2
    assert "not UTF-8 text at byte 12" in result.stderr


@pytest.mark.parametrize("change", ["flip", "truncate", "foreign", "version"])
def test_a_damaged_engine_is_3(alphabet: Path, tmp_path: Path, change: str) -> None:
    data = bytearray(alphabet.read_bytes())
    if change == "flip":
        data[len(data) // 2] ^= 1
    elif change == "truncate":
        del data[-100:]
    elif change == "foreign":
        data = bytearray(b"no engine at all")
    else:
        data = data.replace(b'"format_version":"1"', b'"format_version":"9"')
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(data)
    result = CliRunner().invoke(cli, ["run", str(damaged), "--prompt", "a"])
    assert result.exit_code == 3, result.stderr
    assert "damaged.engine" in result.stderr
    assert result.stdout == ""


def test_an_engine_for_another_target_names_both(tmp_path: Path, write_engine: Write) -> None:
    other = write_engine(tmp_path / "other.engine", target="cuda:h100")
    result = CliRunner().invoke(cli, ["run", str(other), "--prompt", "a"])
    assert result.exit_code == 3
    assert "cuda:h100" in result.stderr
    assert "cpu:" in result.stderr


@pytest.mark.parametrize(
    ("number", "to_file", "code", "word"),
    [
        (signal.SIGINT, False, 130, "interrupted"),
        (signal.SIGINT, True, 130, "interrupted"),
        (signal.SIGTERM, True, 143, "terminated"),
    ],
)
def test_a_signal_prints_what_there_is_and_leaves_no_file(
    tmp_path: Path, write_engine: Write, number: int, to_file: bool, code: int, word: str
) -> None:
    """In a real process that would run for minutes."""
    engine = write_engine(tmp_path / "long.engine", max_seq_len=1_000_000)
    output = ["--output", str(tmp_path / "out.jsonl")] if to_file else []
    flags = ["--prompt", "a", "--ignore-eos", "--max-tokens", "900000", "--stats"]
    process = subprocess.Popen(
        [TAPEOUT, "run", str(engine), *flags, *output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )
    assert process.stdout is not None
    if to_file:
        while not list(tmp_path.glob(".out.jsonl.*")):  # made when generation starts
            assert process.poll() is None
    first = process.stdout.read(0 if to_file else 8)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert errors.endswith(word + "\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.engine"]
    if not to_file:
        assert first == "bcdefghi"
        assert rest.endswith("\n")
        assert "tokens: 1 prompt" in errors


def test_a_terminal_is_not_waited_for(alphabet: Path) -> None:
    """Without --prompt there is nothing to read from a terminal: a usage error."""
    primary, secondary = pty.openpty()
    done = subprocess.run(
        [TAPEOUT, "run", str(alphabet)],
        stdin=secondary,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(primary)
    os.close(secondary)
    assert done.returncode == 2
    assert "Missing prompt" in done.stderr


@pytest.mark.parametrize("args", [["run", "ENGINE", "--prompt", "x"], ["inspect", "ENGINE", "--verify"]])
def test_running_needs_nothing_of_the_build_extra(alphabet: Path, args: list[str]) -> None:
    """As on a machine with `pip install tapeout[cpu]` only."""
    code = """
import sys
absent = sys.argv.pop(1).split(",")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from tapeout.cli.main import main
main()
"""
    absent = "transformers,gguf,safetensors,ml_dtypes,ziglang,onnx,onnx_graphsurgeon,polygraphy,yaml,rich"
    command = [sys.executable, "-c", code, absent, *[str(alphabet) if a == "ENGINE" else a for a in args]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("yz" if args[0] == "run" else "engine")


def test_bad_generation_defaults_are_told_to_be_the_engines(tmp_path: Path, write_engine: Write) -> None:
    engine = write_engine(
        tmp_path / "old.engine", generation={"do_sample": True, "temperature": -3.0, "max_new_tokens": -2}
    )
    result = CliRunner().invoke(cli, ["run", str(engine), "--prompt", "a"])
    assert result.exit_code == 2
    assert result.stderr.count("(from the engine's generation config)") == 2
    flags = ["--prompt", "a", "--temperature", "0", "--max-tokens", "1"]
    assert ok(CliRunner().invoke(cli, ["run", str(engine), *flags])).stdout == "b\n"
