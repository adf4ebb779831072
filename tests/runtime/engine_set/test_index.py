"""The index of an engine set: what is written is what is read, and everything wrong is told at once."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine_set import (
    INDEX_NAME,
    EngineEntry,
    EngineSetIndex,
    WeightsEntry,
    load_index,
    parse_index,
    save_index,
)

SHA = "0123456789abcdef" * 4
SHARED = WeightsEntry("0f0f.weights.safetensors", 1000, SHA)
H200 = EngineEntry(
    file="h200.engine",
    target="cuda:h200",
    sku="h200",
    sm=90,
    dtype="bfloat16",
    quantize="none",
    limits=Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=128, tokens_per_page=16),
    timed=True,
    size_bytes=10,
    sha256=SHA,
    content_key="key of h200",
    weights=(SHARED.file,),
    versions={"tapeout": "0.1.0"},
)
CPU = replace(H200, file="cpu.engine", target="cpu:x86_64_v3", sku=None, sm=None, weights=())
INDEX = EngineSetIndex.of(
    "tiny", "hf config:1 weights:2", (H200, CPU), (SHARED, SHARED), {"tapeout": "0.1.0"}
)

positive = st.integers(1, 2**63)
texts = st.text(min_size=1, max_size=20)
mappings = st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3)
names = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=12)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
targets = st.one_of(
    st.builds(lambda level: (f"cpu:{level}", None, None), names),
    st.builds(lambda sm: (f"cuda:sm_{sm}", None, sm), st.integers(10, 999)),
    st.builds(
        lambda sku, sm: (f"cuda:{sku}", sku, sm),
        st.sampled_from(["h200", "l4", "b200"]),
        st.integers(10, 999),
    ),
)


@st.composite
def indexes(draw: st.DrawFn) -> EngineSetIndex:
    stems = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    shared = [
        WeightsEntry(f"{stem}.safetensors", draw(positive), draw(hashes))
        for stem in draw(st.lists(names, max_size=3, unique=True))
    ]
    engines = []
    for i, stem in enumerate(stems):
        target, sku, sm = draw(targets)
        # The first engine needs all of them, so that each belongs to somebody.
        needed = shared if i == 0 else draw(st.lists(st.sampled_from(shared), unique=True)) if shared else []
        engines.append(
            EngineEntry(
                file=f"{stem}.engine",
                target=target,
                sku=sku,
                sm=sm,
                dtype=draw(texts),
                quantize=draw(texts),
                limits=Limits(*(draw(positive) for _ in range(4))),
                timed=draw(st.booleans()),
                size_bytes=draw(positive),
                sha256=draw(hashes),
                content_key=draw(texts),
                weights=tuple(w.file for w in needed),
                versions=draw(mappings),
            )
        )
    return EngineSetIndex.of(draw(names), draw(texts), tuple(engines), tuple(shared), draw(mappings))


@given(indexes())
def test_an_index_survives_being_written_and_read(index: EngineSetIndex) -> None:
    text = index.text()
    assert parse_index(text, "index.json") == index
    assert parse_index(text.encode(), "index.json").text() == text


def test_a_saved_index_is_loaded_and_replaces_the_old_one(tmp_path: Path) -> None:
    save_index(INDEX, tmp_path)
    assert load_index(tmp_path) == INDEX
    other = replace(INDEX, model="other")
    assert save_index(other, tmp_path) == tmp_path / INDEX_NAME
    assert load_index(tmp_path) == other
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_entries_are_sorted_and_shared_weights_listed_once() -> None:
    assert [e.file for e in INDEX.engines] == ["cpu.engine", "h200.engine"]
    assert INDEX.weights == (SHARED,)
    assert INDEX.files() == {
        SHARED.file: (1000, SHA),
        "cpu.engine": (10, SHA),
        "h200.engine": (10, SHA),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"file": "../h200.engine"}, "expected a file name of letters"),
        ({"file": "h200.bin"}, "ends in .engine"),
        ({"sha256": "ABC"}, "sha256 is 'ABC', expected 64 lower-case hex digits"),
        ({"size_bytes": 0}, "size_bytes is 0"),
        ({"target": "tpu:v5"}, "target is 'tpu:v5'"),
        ({"sku": None}, "sku is None, its target 'cuda:h200' says 'h200'"),
        ({"sm": None}, "sm is None, expected a compute capability times ten"),
        ({"target": "cuda:sm_90", "sku": None, "sm": 80}, "sm is 80, expected 90"),
        ({"content_key": ""}, "content_key is empty"),
        ({"weights": ("gone.safetensors",)}, "needs 'gone.safetensors', which is not among the weights"),
        ({"weights": ()}, "belongs to no engine"),
        ({"file": "CPU.engine"}, "file 'cpu.engine' is listed 2 times"),
        ({"limits": replace(H200.limits, max_seq_len=0)}, "limits.max_seq_len is 0"),
    ],
)
def test_an_unsound_index_is_neither_written_nor_read(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    engines = tuple(sorted((CPU, replace(H200, **changes)), key=lambda e: e.file))
    index = replace(INDEX, engines=engines)
    with pytest.raises(TapeoutError) as raised:
        save_index(index, tmp_path)
    assert expected in raised.value.message
    assert list(tmp_path.iterdir()) == []

    data = json.loads(INDEX.text())
    (place,) = (i for i, e in enumerate(data["engines"]) if e["file"] == "h200.engine")
    data["engines"][place] |= json.loads(json.dumps(changes, default=vars))
    data["engines"].sort(key=lambda e: e["file"])
    with pytest.raises(EngineCorruptError) as read:
        parse_index(json.dumps(data), "index.json")
    assert expected in read.value.message


def test_every_problem_is_listed() -> None:
    data = json.loads(INDEX.text())
    data["extra"] = 1
    data["engines"][0]["timed"] = "yes"
    data["engines"][1]["limits"]["max_batch_size"] = 1.5
    del data["engines"][1]["sha256"]
    del data["weights"][0]["file"]
    with pytest.raises(EngineCorruptError) as raised:
        parse_index(json.dumps(data), "sets/tiny/index.json")
    lines = raised.value.message.splitlines()
    assert lines[0] == "sets/tiny/index.json is unsound:"
    for expected in (
        "index: keys do not match EngineSetIndex: unknown ['extra']",
        "engines[0].timed: expected bool, got 'yes'",
        "engines[1]: keys do not match EngineEntry: missing ['sha256']",
        "engines[1].limits.max_batch_size: expected int, got 1.5",
        "weights[0]: keys do not match WeightsEntry: missing ['file']",
    ):
        assert f"  {expected}" in lines
    assert len(lines) == 6


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version_is_refused_before_anything_else(version: Any) -> None:
    data = {"format": "tapeout-engine-set", "format_version": version, "what": "a later version may hold"}
    with pytest.raises(EngineIncompatibleError, match=f"has version {version!r} of the index format"):
        parse_index(json.dumps(data), "index.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "other"}', b"\xff\xfe", "[" * 100_000])
def test_what_is_no_index_is_called_so(text: str | bytes) -> None:
    with pytest.raises(EngineCorruptError, match=r"a/index.json is not"):
        parse_index(text, "a/index.json")


def test_a_directory_without_an_index_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"index.json cannot be read: No such file"):
        load_index(tmp_path)
