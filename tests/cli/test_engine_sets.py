"""A directory in the place of an engine: its engine for this machine is taken, or what there is is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, ok

from tapeout.plugins.errors import EngineCorruptError, EngineError, UsageError
from tapeout.plugins.native.host import detect_host
from tapeout.runtime import LLM
from tapeout.runtime.engine_set import (
    EngineEntry,
    EngineSetIndex,
    describe_engine,
    load_index,
    save_index,
)

LEVEL = detect_host().level
Write = Callable[..., Path]


def make_set(folder: Path, write: Write, *extra: EngineEntry) -> Path:
    """A set of one engine for this CPU, `cpu.engine`, with shared weights, and entries of others."""
    folder.mkdir()
    engine, weights = describe_engine(write(folder / "cpu.engine", shared=True))
    index = EngineSetIndex.of("alphabet", "test:0", (engine, *extra), weights, {"tapeout": "test"})
    save_index(index, folder)
    return folder


@pytest.fixture(scope="module")
def alphabet_set(tmp_path_factory: pytest.TempPathFactory, write_engine: Write) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "alphabet"
    make_set(folder, write_engine)
    index = load_index(folder)
    h200 = replace(index.engines[0], file="h200.engine", target="cuda:h200", sku="h200", sm=90)
    save_index(replace(index, engines=(*index.engines, h200)), folder)
    return folder


def test_run_takes_the_engine_for_this_machine(alphabet_set: Path) -> None:
    prompt = ("--prompt", "abc", "--temperature", "0")
    assert ok(invoke("run", alphabet_set, *prompt)) == "defghijklmnopqrstuvwxyz\n"
    assert ok(invoke("run", alphabet_set, *prompt, "--target", "cpu")) == "defghijklmnopqrstuvwxyz\n"
    one = ok(invoke("run", alphabet_set, *prompt, "--target", f"cpu:{LEVEL}", "--precision", "float32"))
    assert one == "defghijklmnopqrstuvwxyz\n"


def test_bench_measures_the_engine_for_this_machine(alphabet_set: Path) -> None:
    args = ("--input-len", "4", "--output-len", "2", "--num-iters", "1", "--no-roofline", "--json")
    record = json.loads(ok(invoke("bench", "latency", alphabet_set, *args)))
    assert record["conditions"]["engine"]["file"] == "cpu.engine"


def test_llm_takes_a_directory(alphabet_set: Path) -> None:
    with LLM(alphabet_set) as llm:
        assert llm.engine.path == alphabet_set / "cpu.engine"
        (output,) = llm.generate("xy")
        assert output.outputs[0].text == "z"
    with LLM(str(alphabet_set), target="cpu", precision="float32") as llm:
        assert llm.engine.path.name == "cpu.engine"
    with pytest.raises(UsageError, match="no engine of precision 'int8'"):
        LLM(alphabet_set, precision="int8")


def test_a_choice_by_hand_that_cannot_run_here_is_refused_by_the_machine_check(
    tmp_path: Path, write_engine: Write
) -> None:
    folder = make_set(tmp_path / "alphabet", write_engine)
    engine, _ = describe_engine(write_engine(folder / "arm.engine", shared=True, target="cpu:aarch64"))
    index = load_index(folder)
    save_index(EngineSetIndex.of("alphabet", "test:0", (*index.engines, engine), index.weights, {}), folder)
    assert ok(invoke("run", folder, "--prompt", "xy", "--temperature", "0")) == "z\n"
    result = invoke("run", folder, "--prompt", "a", "--target", "cpu:aarch64")
    assert result.exit_code == 3
    assert "was built for cpu:aarch64, this machine is" in result.stderr


def test_a_set_without_an_engine_for_this_machine_is_refused_with_what_it_has(
    tmp_path: Path, alphabet_set: Path
) -> None:
    index = load_index(alphabet_set)
    gpu_only = EngineSetIndex.of("m", "test:0", (index.engines[1],), index.weights, {})
    save_index(gpu_only, tmp_path)
    result = invoke("run", tmp_path, "--prompt", "a")
    assert result.exit_code == 3
    assert "has no engine for this machine" in result.stderr
    assert "h200.engine  cuda:h200 (sm_90)  float32" in result.stderr


def test_target_and_precision_are_refused_where_nothing_is_chosen(alphabet: Path) -> None:
    for option, value in (("--target", "cpu"), ("--precision", "float32")):
        for command in (("run", "--prompt", "a"), ("inspect",), ("bench", "latency"), ("weights", "m")):
            name, *rest = command
            where = ("latency", alphabet) if name == "bench" else (alphabet,)
            args = () if name == "bench" else rest
            result = invoke(name, *where, *args, option, value)
            assert result.exit_code == 2, result.stderr
            assert f"{option} {value}: expected with an engine set" in result.stderr


@pytest.mark.parametrize("change", [None, b"", b"another build"])
def test_an_engine_that_the_index_does_not_describe_is_refused(
    change: bytes | None, tmp_path: Path, write_engine: Write
) -> None:
    folder = make_set(tmp_path / "alphabet", write_engine)
    if change is None:
        (folder / "cpu.engine").unlink()
    else:
        (folder / "cpu.engine").write_bytes(change)
    with pytest.raises(
        EngineCorruptError, match=r"cpu\.engine (is not there|has \d+ bytes), index.json lists it"
    ):
        LLM(folder)


# ---- without an index ---------------------------------------------------------------------------


def test_a_directory_of_engines_is_a_set_without_an_index(tmp_path: Path, write_engine: Write) -> None:
    write_engine(tmp_path / "here.engine")
    write_engine(tmp_path / "arm.engine", target="cpu:aarch64")
    (tmp_path / ".hidden.engine").write_bytes(b"a build under way")
    (tmp_path / "notes.txt").write_text("nothing of ours")
    assert ok(invoke("run", tmp_path, "--prompt", "xy", "--temperature", "0")) == "z\n"
    shown = json.loads(ok(invoke("inspect", tmp_path, "--json")))
    assert (shown["indexed"], shown["chosen"]) == (False, "here.engine")
    assert [e["file"] for e in shown["engines"]] == ["arm.engine", "here.engine"]
    write_engine(tmp_path / "again.engine")
    with pytest.raises(UsageError, match="2 engines that fit equally well"):
        LLM(tmp_path)


def test_engines_of_several_models_are_no_set(tmp_path: Path, write_engine: Write) -> None:
    from tapeout.runtime.engine.manifest import ModelFacts

    write_engine(tmp_path / "a.engine")
    other = ModelFacts("Alphabet", "alphabet", "float32", "none", 28, 256, "test:1")
    write_engine(tmp_path / "b.engine", model=other)
    with pytest.raises(UsageError, match="holds engines of 2 models") as raised:
        LLM(tmp_path)
    assert raised.value.message.splitlines()[1:] == ["  a.engine: test:0", "  b.engine: test:1"]


def test_one_unreadable_engine_is_told_and_nothing_is_chosen(tmp_path: Path, write_engine: Write) -> None:
    engine = write_engine(tmp_path / "good.engine")
    (tmp_path / "short.engine").write_bytes(engine.read_bytes()[:5000])
    (tmp_path / "foreign.engine").write_bytes(b"PK" * 100)
    with pytest.raises(EngineError, match="not all of its engines can be read") as raised:
        LLM(tmp_path)
    assert "foreign.engine is not a tapeout engine" in raised.value.message
    assert "short.engine" in raised.value.message


def test_a_directory_of_sets_names_them(tmp_path: Path, write_engine: Write) -> None:
    for name in ("one", "two"):
        make_set(tmp_path / name, write_engine)
    result = invoke("run", tmp_path, "--prompt", "a")
    assert result.exit_code == 2
    assert "is a directory, expected an engine file or an engine set" in result.stderr
    assert f"hint: it holds engine sets: name one, {tmp_path / 'one'} (one, two)" in result.stderr


# ---- inspect and weights ------------------------------------------------------------------------


def test_inspect_lists_a_set_and_what_runs_here(alphabet_set: Path) -> None:
    text = ok(invoke("inspect", alphabet_set))
    assert "runs here   cpu.engine" in text
    assert "checksums   not read; --verify reads all files" in text
    (line,) = [line for line in text.splitlines() if line.startswith("  h200.engine")]
    assert line.split()[:8] == ["h200.engine", "cuda:h200", "(sm_90)", "float32", "none", "4", "64", "256"]
    shown = json.loads(ok(invoke("inspect", alphabet_set, "--json")))
    assert shown["model"] == "alphabet"
    assert shown["weights"][0]["present"] is True
    assert shown["engines"][0]["limits"]["max_seq_len"] == 256


def test_inspect_shows_one_engine_when_it_is_asked_for(alphabet_set: Path) -> None:
    for option in (("--target", "cpu"), ("--precision", "float32"), ("--program",)):
        shown = json.loads(ok(invoke("inspect", alphabet_set, "--json", *option)))
        assert shown["engine"] == str(alphabet_set / "cpu.engine")


def test_inspect_verifies_every_file_of_a_set(tmp_path: Path, write_engine: Write) -> None:
    folder = make_set(tmp_path / "alphabet", write_engine)
    assert "all files verified" in ok(invoke("inspect", folder, "--verify"))
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-50] ^= 1
    weights.write_bytes(data)
    (folder / "cpu.engine").unlink()
    result = invoke("inspect", folder, "--verify")
    assert result.exit_code == 3
    assert "cpu.engine is missing" in result.stderr
    assert f"{weights.name} has SHA-256" in result.stderr


def test_weights_are_written_once_for_all_engines_that_share_them(
    tmp_path: Path, write_engine: Write
) -> None:
    from tapeout.runtime.resolve_engine import weight_owners

    folder = make_set(tmp_path / "alphabet", write_engine)
    arm, _ = describe_engine(write_engine(folder / "arm.engine", shared=True, target="cpu:aarch64"))
    index = load_index(folder)
    save_index(EngineSetIndex.of("alphabet", "test:0", (*index.engines, arm), index.weights, {}), folder)
    assert weight_owners(folder) == [folder / "arm.engine"]
    assert weight_owners(folder, target=f"cpu:{LEVEL}") == [folder / "cpu.engine"]
    write_engine(tmp_path / "embedded.engine")
    with pytest.raises(UsageError, match="all of these engines embed their weights"):
        weight_owners(tmp_path)


def test_a_gpu_of_the_machine_decides(alphabet_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU in the machine, `run` goes for its engine, though the cpu engine would run, too."""
    from tapeout.runtime.engine.target import GpuFacts
    from tapeout.runtime.engine_set import directory
    from tapeout.runtime.engine_set.machine import Machine

    def machine(**options: Any) -> Machine:
        assert options == {"look_for_gpu": True}
        return Machine(GpuFacts("NVIDIA H200", 90, 132, 141 << 30, 13000), LEVEL)

    monkeypatch.setattr(directory, "this_machine", machine)
    result = invoke("run", alphabet_set, "--prompt", "a")
    assert result.exit_code == 3
    assert "h200.engine is not there" in result.stderr
