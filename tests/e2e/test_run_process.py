"""`tapeout run` of SmolLM2 in real processes: pipes, a terminal, Ctrl-C, and memory while it works."""

from __future__ import annotations

import codecs
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine

Tapeout = Callable[..., subprocess.CompletedProcess[str]]
MIB = 1 << 20
EMOJI = "Answer with three emoji only: 😀🎉🚀"


def test_a_question_is_answered(tapeout: Tapeout, smollm2: Path, llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    args = [
        "--chat",
        "--system",
        messages[0]["content"],
        "--prompt",
        messages[1]["content"],
        "--temperature",
        "0",
    ]
    done = tapeout("run", smollm2, *args, "--stats", stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    (expected,) = llm.chat(messages, llm.default_sampling_params(temperature=0.0, max_tokens=256))
    assert "Paris" in done.stdout
    assert done.stdout == expected.outputs[0].text + "\n"
    for line in ("load: ", "time to first token: ", "throughput: ", "decode: "):
        assert f"\n{line}" in "\n" + done.stderr
    count = f"tokens: {len(expected.prompt_token_ids)} prompt, {len(expected.outputs[0].token_ids)} output"
    assert count in done.stderr


def test_lines_of_requests_through_pipes(tapeout: Tapeout, smollm2: Path, llm: LLM, tmp_path: Path) -> None:
    """Every kind of line in one process; each answer is what the same request gives in this one."""
    story = "Once upon a time"
    deltas = [d.outputs[0] for d in llm.stream(story, SamplingParams(temperature=0, max_tokens=24))]
    greedy = [i for delta in deltas for i in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    across = deltas[5].text[-2:] + deltas[6].text + deltas[7].text[:2]
    lines: list[dict[str, Any]] = [
        {"id": "plain", "prompt": story, "temperature": 0},
        {"id": "ids", "prompt_token_ids": [1, 504, 3575], "temperature": 0},
        {"id": "chat", "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0},
        {"id": "stop", "prompt": story, "temperature": 0, "stop": ["never there", across]},
        {"id": "stop id", "prompt": story, "temperature": 0, "stop_token_ids": [greedy[5]]},
        {"id": "seed 1", "prompt": story, "temperature": 0.9, "seed": 11},
        {"id": "seed 2", "prompt": story, "temperature": 0.9, "seed": 11},
        {"id": "seed 3", "prompt": story, "temperature": 0.9, "seed": 12},
        {"id": "few", "prompt": story, "temperature": 0, "max_tokens": 3, "logprobs": 2},
        {"id": "more", "prompt": story, "temperature": 0, "min_tokens": 8, "stop": across},
    ]
    output = tmp_path / "answers.jsonl"
    source = "\n".join(json.dumps(line) for line in lines)
    done = tapeout("run", smollm2, "--input", "-", "--output", output, "--max-tokens", "24", input=source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [a["id"] for a in answers] == [line["id"] for line in lines]
    by_id = {a["id"]: a for a in answers}

    prompts, params = [], []
    for line in lines:
        fields = {k: v for k, v in line.items() if k not in ("id", "prompt", "messages", "prompt_token_ids")}
        params.append(llm.default_sampling_params(**{"max_tokens": 24, **fields}))
        chat = "messages" in line
        prompts.append(
            llm.chat_prompt(line["messages"]) if chat else line.get("prompt") or line["prompt_token_ids"]
        )
    for answer, output in zip(answers, llm.generate(prompts, params), strict=True):
        expected = output.outputs[0]
        assert answer["token_ids"] == list(expected.token_ids), answer["id"]
        assert (answer["text"], answer["finish_reason"]) == (expected.text, expected.finish_reason)
        assert answer["metrics"]["time_to_first_token_seconds"] > 0
    assert by_id["stop"]["text"] == text[: text.index(across)]
    assert by_id["stop"]["stop_reason"] == across
    assert by_id["stop id"]["stop_reason"] == greedy[5]
    assert by_id["seed 1"]["text"] == by_id["seed 2"]["text"] != by_id["seed 3"]["text"]
    assert len(by_id["more"]["token_ids"]) >= 8
    assert [len(token) for token in by_id["few"]["logprobs"]] == [2, 2, 2]


def test_a_terminal_shows_text_as_it_comes_and_no_half_characters(
    command: Path, smollm2: Path, llm: LLM
) -> None:
    """An emoji takes several tokens; none may be shown before its last one."""
    prompt = llm.chat_prompt([{"role": "user", "content": EMOJI}])
    deltas = list(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=48)))
    # The tokens up to the last whole character; the limit may cut the one after it.
    whole = max(i for i, delta in enumerate(deltas[:-1], 1) if delta.outputs[0].text)
    count = sum(len(delta.outputs[0].token_ids) for delta in deltas[:whole])
    text = "".join(delta.outputs[0].text for delta in deltas[:whole])
    assert sum(ord(c) > 0xFFFF for c in text) > 3, text
    assert len(text) < count
    assert "\ufffd" not in text
    args = ["--chat", "--prompt", EMOJI, "--temperature", "0", "--max-tokens", str(count)]
    shown = list(_on_a_terminal([command, "run", smollm2, *args]))
    assert "".join(shown) == text + "\r\n"
    assert len(shown) > 3


def _on_a_terminal(args: list[Any]) -> Iterator[str]:
    """What appears on a terminal, piece by piece; every piece must be whole UTF-8."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        list(map(str, args)),
        stdin=secondary,
        stdout=secondary,
        stderr=subprocess.PIPE,
    )
    os.close(secondary)
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    while True:
        try:
            data = os.read(primary, 4096)
        except OSError:  # how Linux reports that the other end was closed
            break
        if not data:
            break
        piece = decoder.decode(data)
        assert decoder.getstate()[0] == b"", f"{data!r} ends within a character"
        yield piece
    _, errors = process.communicate(timeout=60)
    os.close(primary)
    assert process.returncode == 0, errors


@contextmanager
def generating(command: Path, engine: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of a long answer."""
    args = ["--prompt", "Once upon a time", "--ignore-eos", "--max-tokens", "4000", "--temperature", "0"]
    process = subprocess.Popen(
        [command, "run", engine, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        seen, deadline = b"", time.monotonic() + 120
        while len(seen) < 40:
            assert time.monotonic() < deadline
            if select.select([process.stdout], [], [], 1)[0]:
                piece = os.read(process.stdout.fileno(), 4096)
                assert piece, process.communicate()
                seen += piece
        yield process
    finally:
        process.kill()
        process.communicate()


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def prepacked_bytes(engine: Path) -> int:
    """Bytes of weights that some chosen tactic lays out anew when the engine is loaded."""
    with open_engine(engine, verify=False) as opened:
        copied = {
            (weight, choice.tactic): opened.weights[weight].size_bytes
            for record in opened.program.records
            for choice in opened.program.tactics[record.signature]
            if choice.tactic == "onednn"
            for weight in record.weights
            if weight
        }
    return sum(copied.values())


@pytest.mark.parametrize("engine", ["smollm2", "smollm2_int8"])
def test_ctrl_c_ends_cleanly_and_weights_are_not_copied(
    command: Path, engine: str, tiny_anonymous_bytes: int, request: pytest.FixtureRequest
) -> None:
    """Weights stay in the mapped file, but for those of tactics that need their own layout.

    Compared with a process that runs a tiny engine, so that what Python and torch take does not count;
    the rest is arena, KV pages in use and logits.
    """
    path: Path = request.getfixturevalue(engine)
    with open_engine(path, verify=False) as opened:
        weights = opened.sizes()["weights"]
    with generating(command, path) as process:
        own = anonymous_bytes(process.pid) - tiny_anonymous_bytes
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == b"interrupted"
    assert weights > 200 * MIB
    assert own < prepacked_bytes(path) + 100 * MIB


@pytest.fixture(scope="module")
def tiny_anonymous_bytes(tiny_engine: Path) -> int:
    """What a process takes that has loaded torch and a tiny engine."""
    code = "import sys, time; from tapeout.runtime import LLM, SamplingParams; llm = LLM(sys.argv[1]); "
    code += "llm.generate('the', SamplingParams(max_tokens=4, temperature=0)); "
    code += "print('ready', flush=True); sys.stdin.read()"

    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_engine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        return anonymous_bytes(process.pid)
    finally:
        process.communicate()
