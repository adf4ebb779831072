"""Content keys: the same for the same engine wherever it is built, another one whenever it would differ."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapeout.compiler.matrix import content_key, file_digests
from tapeout.compiler.matrix.content_key import changed_factors, factors_of, key_of
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.plan import plan_pack
from tapeout.compiler.matrix.schema import EngineSpec
from tapeout.compiler.options import FIELDS, BuildOptions
from tapeout.plugins.cpu import HostCpu
from tapeout.plugins.errors import UsageError

# A valid other value for every option that changes what an engine holds.
OTHER: dict[str, Any] = {
    "target": "cuda:sm_80",
    "dtype": "bfloat16",
    "max_batch_size": 3,
    "max_num_tokens": 100,
    "max_seq_len": 64,
    "tokens_per_page": 16,
    "weights": "shared",
    "quantize": "int8-dynamic",
    "batch_invariant": True,
    "tactics": "native",
    "verify": False,
    "seed": 7,
    "trust_remote_code": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a model, as far as a key looks at them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json", "modeling_x.py", "README.md"):
        (folder / name).write_text(f"{name} is here")
    for shard in ("a.safetensors", "b.safetensors"):
        (folder / shard).write_bytes(shard.encode())
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "digests.json")


def spec(model: Path, **options: Any) -> EngineSpec:
    return EngineSpec("m", "engine", str(model), BuildOptions(**{"target": "cpu", **options}))


class TestOptions:
    def test_every_option_that_changes_the_engine_is_tried(self) -> None:
        assert set(OTHER) == {name for name, f in FIELDS.items() if f.metadata["identity"]}

    @pytest.mark.parametrize("name", sorted(OTHER))
    def test_an_option_that_changes_the_engine(self, model: Path, digests: FileDigests, name: str) -> None:
        base = {"target": "cuda:h200"} if name == "tactics" else {}
        before = factors_of(spec(model, **base), digests)
        after = factors_of(spec(model, **{**base, name: OTHER[name]}), digests)
        assert key_of(before) != key_of(after)
        assert ("target" if name == "target" else f"option.{name}") in changed_factors(before, after)

    @pytest.mark.parametrize(
        "options",
        [{"dump": Path("d")}, {"dry_run": True}, {"timing_cache": Path("t.json")}, {"pack": Path("p")}],
        ids=str,
    )
    def test_an_option_that_does_not(
        self, model: Path, digests: FileDigests, options: dict[str, Any]
    ) -> None:
        assert factors_of(spec(model, **options), digests) == factors_of(spec(model), digests)

    def test_spellings_of_one_value(self, model: Path, digests: FileDigests) -> None:
        one, other = (factors_of(spec(model, dtype=dtype), digests) for dtype in ("bf16", "bfloat16"))
        assert one == other

    def test_names_are_not_content(self, model: Path, digests: FileDigests) -> None:
        other = replace(spec(model), model="another", name="else")
        assert factors_of(other, digests) == factors_of(spec(model), digests)


class TestPacks:
    def test_what_is_not_timed_has_none(self, model: Path, digests: FileDigests, tmp_path: Path) -> None:
        """And does not end the stage for the others."""
        planned = plan_pack(spec(model, target="cpu"), tmp_path, digests)
        assert planned.why is None
        assert planned.error is None
        for tactics in ("auto", "tensorrt"):
            assert (
                plan_pack(spec(model, target="cuda:l4", tactics=tactics), tmp_path, digests).why is not None
            )


class TestModel:
    def test_the_place_does_not_count(
        self, model: Path, digests: FileDigests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = factors_of(spec(model), digests)
        copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "m"))
        (copy / "README.md").write_text("another text")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("USER", "somebody")
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.chdir(copy.parent)
        assert factors_of(spec(Path("m")), digests) == before
        assert not any(str(tmp_path) in value for value in before.values())

    @pytest.mark.parametrize(
        "name", ["config.json", "tokenizer.json", "generation_config.json", "b.safetensors"]
    )
    def test_a_file_that_changes(self, model: Path, digests: FileDigests, name: str) -> None:
        before = factors_of(spec(model), digests)
        (model / name).write_text("changed")
        assert changed_factors(before, factors_of(spec(model), digests)) == [f"model.{name}"]

    def test_a_file_that_appears(self, model: Path, digests: FileDigests) -> None:
        before = factors_of(spec(model), digests)
        (model / "chat_template.jinja").write_text("hello")
        assert changed_factors(before, factors_of(spec(model), digests)) == ["model.chat_template.jinja"]

    def test_code_counts_where_it_may_run(self, model: Path, digests: FileDigests) -> None:
        trusting = spec(model, trust_remote_code=True)
        before = factors_of(spec(model), digests), factors_of(trusting, digests)
        (model / "modeling_x.py").write_text("changed")
        assert factors_of(spec(model), digests) == before[0]
        assert changed_factors(before[1], factors_of(trusting, digests)) == ["model.modeling_x.py"]

    def test_a_gguf_file_by_its_content(self, tmp_path: Path, digests: FileDigests) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).write_bytes(b"GGUF1234")
        one, other = (factors_of(spec(tmp_path / name), digests) for name in ("a.gguf", "b.gguf"))
        assert one == other
        (tmp_path / "a.gguf").write_bytes(b"GGUF1235")
        assert changed_factors(factors_of(spec(tmp_path / "a.gguf"), digests), other) == ["model"]

    def test_a_model_that_is_not_there(self, tmp_path: Path, digests: FileDigests) -> None:
        with pytest.raises(UsageError, match="no such file or directory"):
            factors_of(spec(tmp_path / "none"), digests)


class TestBuilder:
    def test_the_level_of_the_cpu(
        self, model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, targets = set(), set()
        for level in ("x86_64_v3", "x86_64_v4"):
            for threads in (2, 8):  # how many there are says nothing about the engine
                monkeypatch.setattr(content_key, "detect_host", lambda: HostCpu(level, threads))  # noqa: B023
                keys.add(key_of(factors_of(spec(model), digests)))
                targets.add(factors_of(spec(model), digests)["target"])
        assert targets == {"cpu:x86_64_v3", "cpu:x86_64_v4"}
        assert len(keys) == 2

    def test_versions_and_sources_are_factors(self, model: Path, digests: FileDigests) -> None:
        cpu, cuda = (factors_of(spec(model, target=t), digests) for t in ("cpu", "cuda:h200"))
        common = {
            "version.tapeout",
            "version.torch",
            "version.transformers",
            "source.plugins",
            "source.compiler",
        }
        assert common <= cpu.keys() & cuda.keys()
        assert "kernels" in cpu
        assert {"version.triton", "version.ptxas"} <= cuda.keys()

    @pytest.mark.parametrize("package", ["torch", "transformers", "tapeout"])
    def test_another_version(
        self, model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        before = factors_of(spec(model), digests)
        real = content_key._version
        monkeypatch.setattr(content_key, "_version", lambda name: "99" if name == package else real(name))
        assert changed_factors(before, factors_of(spec(model), digests)) == [f"version.{package}"]

    def test_who_makes_parts_of_an_engine_counts_where_it_is_asked_for(
        self, model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(content_key, "_PROVIDERS", {"native": ("maker", "not-installed")})
        monkeypatch.setattr(content_key, "_version", {"maker": "1.2"}.get)
        asked, other = (
            factors_of(spec(model, target="cuda:h200", tactics=tactics), digests)
            for tactics in ("native", "auto")
        )
        assert asked["version.maker"] == "1.2"
        assert changed_factors(asked, other) == ["option.tactics", "version.maker"]

    def test_a_source_file_that_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (
            "plugins/op/cuda.py",
            "compiler/fuse.py",
            "compiler/matrix/pool.py",
            "compiler/README.md",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("1")
        monkeypatch.setattr(content_key, "_ROOT", tmp_path)

        def digest(folder: str) -> str:
            content_key._sources_digest.cache_clear()
            return content_key._sources_digest(folder)

        before = digest("plugins"), digest("compiler")
        (tmp_path / "compiler/matrix/pool.py").write_text("2")  # who is asked to build, not what is built
        (tmp_path / "compiler/README.md").write_text("2")
        assert (digest("plugins"), digest("compiler")) == before
        (tmp_path / "plugins/op/cuda.py").write_text("2")
        assert digest("plugins") != before[0]
        (tmp_path / "compiler/fuse.py").rename(tmp_path / "compiler/melt.py")
        assert digest("compiler") != before[1]
        content_key._sources_digest.cache_clear()

    def test_what_changes_the_kernels_compiler(
        self, model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = [factors_of(spec(model, target=t), digests) for t in ("cpu", "cuda:h200")]
        monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
        after = [factors_of(spec(model, target=t), digests) for t in ("cpu", "cuda:h200")]
        assert changed_factors(before[0], after[0]) == []
        assert changed_factors(before[1], after[1]) == ["environment.DISABLE_LLVM_OPT"]


class TestFileDigests:
    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Files that are read whole."""
        names: list[str] = []
        real = file_digests.hashlib.file_digest

        def counted(file: Any, name: str) -> Any:
            names.append(Path(file.name).name)
            return real(file, name)

        monkeypatch.setattr(file_digests.hashlib, "file_digest", counted)
        return names

    def test_a_file_is_read_once(self, tmp_path: Path, reads: list[str]) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"abc")
        os.utime(path, ns=(0, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_digests, "_SETTLED_NS", -(10**12))
            for _ in range(3):
                digests = FileDigests(tmp_path / "memory.json")
                assert digests.sha256(path)[:8] == "ba7816bf"
                digests.save()
        assert reads == ["x"]
        path.write_bytes(b"abd")
        assert FileDigests(tmp_path / "memory.json").sha256(path)[:8] == "a52d159f"

    def test_a_file_of_a_moment_ago_is_not_remembered(self, tmp_path: Path, reads: list[str]) -> None:
        path = tmp_path / "x"
        for content in (b"abc", b"abd"):
            path.write_bytes(content)
            digests = FileDigests(tmp_path / "memory.json")
            digests.sha256(path)
            digests.save()
        assert reads == ["x", "x"]

    @pytest.mark.parametrize(
        "text", ["", "[]", "{", '{"version": 1, "files": {"a": 3}}', "\0", '{"version":0}']
    )
    def test_a_damaged_memory_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "memory.json").write_text(text)
        (tmp_path / "x").write_bytes(b"abc")
        assert FileDigests(tmp_path / "memory.json").sha256(tmp_path / "x").startswith("ba7816bf")

    def test_a_memory_that_cannot_be_written_costs_time_alone(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"abc")
        digests = FileDigests(tmp_path / "x" / "memory.json")
        digests.sha256(tmp_path / "x")
        digests.save()

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="none cannot be read: No such file"):
            FileDigests(tmp_path / "memory.json").sha256(tmp_path / "none")
