"""What is in an engine file, seen by our reader and by the safetensors library."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import EngineCorruptError, EngineIncompatibleError, UsageError
from tapeout.runtime.engine import Manifest, Program, check_target, open_engine


def test_round_trip(
    engine_path: Path, manifest: Manifest, program: Program, arrays: dict[str, np.ndarray]
) -> None:
    with open_engine(engine_path) as engine:
        assert engine.program == program
        assert replace(engine.manifest, weights={}) == manifest
        assert engine.manifest.weights["storage"] == "embedded"
        assert list(engine.manifest.passes) == ["rms_norm", "add_rms_norm"]  # their order is information
        assert list(engine.weights) == list(arrays)
        for name, array in arrays.items():
            weight = engine.weight(name)
            assert (weight.dtype, weight.shape) == (array.dtype.name, array.shape)
            assert bytes(weight.data) == array.tobytes()
            assert weight.data.readonly
            assert engine.weights[name].begin % 64 == 0
        assert engine.text("tokenizer.json") == '{"größe": 1}'.encode()
        assert engine.kernel("native.so") == bytes(range(256)) * 3
        assert (engine.kernel_names, engine.text_names) == (
            ("native.so",),
            ("chat_template.jinja", "tokenizer.json"),
        )
        sizes = engine.sizes()
        assert sizes["total"] == engine_path.stat().st_size
        assert sum(v for k, v in sizes.items() if k not in ("total", "shared_weights")) == sizes["total"]
        engine.verify_all()


def test_attribute_types_survive(engine_path: Path) -> None:
    with open_engine(engine_path) as engine:
        attrs = engine.program.records[0].attrs
    assert {k: type(v) for k, v in attrs.items()} == {"flag": bool, "scale": float, "n": int, "s": str}


def test_the_safetensors_library_opens_it(engine_path: Path, arrays: dict[str, np.ndarray]) -> None:
    with safe_open(engine_path, "numpy") as file:
        metadata = file.metadata()
        assert json.loads(metadata["manifest"])["target"] == "cpu:x86_64_v3"
        np.testing.assert_array_equal(file.get_tensor("weights/w"), arrays["w"])
    assert load_file(engine_path)["text/chat_template.jinja"].tobytes() == b"{{ x }}"


def test_nothing_of_the_host_is_inside(engine_path: Path) -> None:
    data = engine_path.read_bytes()
    assert str(engine_path.parent).encode() not in data
    assert engine_path.name.encode() not in data


def test_a_moved_engine_opens(engine_path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    moved = engine_path.rename(tmp_path / "elsewhere" / "renamed")
    with open_engine(moved) as engine:
        assert engine.text("chat_template.jinja") == b"{{ x }}"


def test_views_outlive_the_engine(engine_path: Path, arrays: dict[str, np.ndarray]) -> None:
    engine = open_engine(engine_path)
    weight = engine.weight("w")
    engine.close()
    engine.close()
    assert bytes(weight.data) == arrays["w"].tobytes()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped memory")
def test_released_weights_leave_memory(
    tmp_path: Path, write_tiny: Any, arrays: dict[str, np.ndarray]
) -> None:
    arrays["large"] = np.arange(2 << 20, dtype=np.int32)
    write_tiny(tmp_path / "e")

    def resident_kib() -> int:
        blocks = Path("/proc/self/smaps").read_text().split(str(tmp_path / "e"))[1:]
        return sum(int(b.split("Rss:")[1].split()[0]) for b in blocks)

    with open_engine(tmp_path / "e") as engine:
        assert resident_kib() < 1024  # checking reads the file without mapping it in
        total = int(np.frombuffer(engine.weight("large").data, np.int32).sum(dtype=np.int64))
        assert resident_kib() >= 8 * 1024
        engine.release_weight("large")
        assert resident_kib() < 1024
        assert int(np.frombuffer(engine.weight("large").data, np.int32).sum(dtype=np.int64)) == total


@pytest.mark.parametrize("cls", ["manifest", "program"])
def test_unknown_missing_and_mistyped_keys_are_refused(cls: str, request: pytest.FixtureRequest) -> None:
    value = request.getfixturevalue(cls)
    kind: Any = type(value)
    data = value.to_json()
    assert kind.from_json(json.loads(json.dumps(data))) == value
    with pytest.raises(EngineCorruptError, match=r"unknown \['colour'\]"):
        kind.from_json({**data, "colour": 1})
    first = next(iter(data))
    with pytest.raises(EngineCorruptError, match=rf"missing \['{first}'\]"):
        kind.from_json({k: v for k, v in data.items() if k != first})
    with pytest.raises(EngineCorruptError, match=rf"{cls}\.{first}: expected int, got True"):
        kind.from_json({**data, first: True})
    with pytest.raises(EngineCorruptError, match="expected an object"):
        kind.from_json([])


def test_errors_name_the_place(program: Program) -> None:
    data = program.to_json()
    data["records"][0]["inputs"][0]["strides"][1] = "1"
    with pytest.raises(
        EngineCorruptError, match=r"program\.records\[0\]\.inputs\[0\]\.strides\[1\]: expected int, got '1'"
    ):
        Program.from_json(data)


HOSTS = {level: HostCpu(level, 2) for level in ("x86_64_v2", "x86_64_v3", "x86_64_v4", "aarch64")}


@pytest.mark.parametrize(
    ("target", "level", "fine"),
    [
        ("cpu:x86_64_v3", "x86_64_v3", True),
        ("cpu:x86_64_v3", "x86_64_v4", True),
        ("cpu:x86_64_v3", "x86_64_v2", False),
        ("cpu:x86_64_v2", "aarch64", False),
        ("cpu:aarch64", "aarch64", True),
        ("cpu:x86_64_v9", "x86_64_v4", False),
        ("cuda:h200", "x86_64_v4", False),
    ],
)
def test_an_engine_runs_on_its_cpu_level_and_later_ones_only(
    write_tiny: Any, manifest: Manifest, tmp_path: Path, target: str, level: str, fine: bool
) -> None:
    write_tiny(tmp_path / "e", manifest=replace(manifest, target=target))
    with open_engine(tmp_path / "e") as engine:
        if fine:
            check_target(engine, HOSTS[level])
            return
        with pytest.raises(EngineIncompatibleError) as error:
            check_target(engine, HOSTS[level])
        assert target in error.value.message
        assert f"cpu:{level}" in error.value.message


def test_strict_sku_takes_a_cpu_level_for_a_model(
    write_tiny: Any, manifest: Manifest, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "e", manifest=replace(manifest, target="cpu:x86_64_v3"))
    with open_engine(tmp_path / "e") as engine:
        check_target(engine, HOSTS["x86_64_v3"], strict_sku=True)
        told = r"cpu:x86_64_v3.*cpu:x86_64_v4.*--strict-sku"
        with pytest.raises(EngineIncompatibleError, match=told) as error:
            check_target(engine, HOSTS["x86_64_v4"], strict_sku=True)
        assert error.value.exit_code == 3
        assert "leave out --strict-sku" in str(error.value.hint)


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        open_engine(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        open_engine(tmp_path / "none")


def test_opening_needs_neither_torch_nor_transformers(engine_path: Path) -> None:
    code = (
        "import sys; from tapeout.runtime.engine import open_engine; open_engine(sys.argv[1]).verify_all(); "
        "sys.exit(str({'torch', 'transformers', 'safetensors', 'ml_dtypes'} & set(sys.modules)) "
        "if {'torch', 'transformers', 'safetensors', 'ml_dtypes'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(engine_path)], check=True)
