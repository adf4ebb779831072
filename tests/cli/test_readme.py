"""What README.md and docs/python.md say about Python is true."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tapeout import runtime
from tapeout.plugins import errors

ANSWERS = "fghijklmnopqrstuvwxyz stop\nbcdefghijklmnopqrstuvwxyz stop\n"
STREAMED = "fghijklmnopqrstuvwxyz stop\n"


@pytest.mark.parametrize(
    ("document", "printed"), [("README.md", ANSWERS), ("docs/python.md", ANSWERS + STREAMED)]
)
def test_the_python_examples_run(
    document: str,
    printed: str,
    repo: Path,
    alphabet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo / document).read_text(), re.S)
    assert blocks
    shutil.copy(alphabet, tmp_path / "smollm2.engine")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, document, "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_error_is_told_and_exported(repo: Path) -> None:
    """Those that `LLM` may raise, under the names that the document has."""
    shown = re.findall(r"^\| `(\w+Error)` \|", (repo / "docs/python.md").read_text(), re.M)
    exported = {name for name in runtime.__all__ if name.endswith("Error")}
    assert set(shown) == exported
    for name in shown:
        assert getattr(runtime, name) is getattr(errors, name)
        assert issubclass(getattr(runtime, name), runtime.TapeoutError)


def test_what_is_raised_when(alphabet: Path, tmp_path: Path) -> None:
    with pytest.raises(runtime.UsageError, match="max_tokens"):
        runtime.SamplingParams(max_tokens=-1)
    with pytest.raises(runtime.UsageError):
        runtime.LLM(tmp_path / "none.engine")
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(alphabet.read_bytes()[:1000])
    with pytest.raises(runtime.EngineCorruptError):
        runtime.LLM(damaged)
    with pytest.raises(runtime.CapacityError):
        runtime.LLM(alphabet, free_memory_fraction=1e-15)
    with runtime.LLM(alphabet) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(runtime.UsageError):  # a stream's at once, not at its first delta
                call([5] * 100_000)
        deltas = [d.outputs[0] for d in llm.stream("abc", runtime.SamplingParams(temperature=0.0))]
        (whole,) = llm.generate("abc", runtime.SamplingParams(temperature=0.0))
        assert len(deltas) > 1
        assert "".join(d.text for d in deltas) == whole.outputs[0].text
        assert sum((d.token_ids for d in deltas), ()) == whole.outputs[0].token_ids
        assert [d.finish_reason for d in deltas] == [
            *[None] * (len(deltas) - 1),
            whole.outputs[0].finish_reason,
        ]
    with pytest.raises(runtime.UsageError, match="closed"):
        llm.generate("abc")
