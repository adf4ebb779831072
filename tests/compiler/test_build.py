"""`build`: engines that are reproducible, complete or absent, and say what they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import tapeout.compiler.tactics.select as select
from tapeout.compiler.build import build
from tapeout.compiler.front_end import FrontEnd
from tapeout.compiler.ir import parse
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.pipeline import PASSES
from tapeout.compiler.report import BuildReport, MemoryPlan
from tapeout.plugins.errors import UnsupportedError, UsageError
from tapeout.plugins.native import detect_host
from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine

PROMPT = [7, 60, 23, 150, 99, 12, 201]
NEW_TOKENS = 12
Options = Callable[..., BuildOptions]


@pytest.fixture(scope="module")
def checkpoint(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(models.make_tiny("llama", tmp_path_factory.mktemp("checkpoint") / "llama"))


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A timing cache that no other file of tests has warmed."""
    return tmp_path_factory.mktemp("own-cache") / "timings.json"


@pytest.fixture(scope="module")
def first(
    checkpoint: Path, own_cache: Path, tmp_path_factory: pytest.TempPathFactory, options: Options
) -> BuildReport:
    """A first build: nothing in the cache, verified, with dumps."""
    folder = tmp_path_factory.mktemp("first")
    return build(str(checkpoint), folder / "m.engine", options(dump=folder / "dump", timing_cache=own_cache))


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def greedy(engine: Path) -> list[int]:
    with LLM(engine) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
        return list(output.outputs[0].token_ids)


def hf_greedy(checkpoint: Path, dtype: torch.dtype) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager").eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(PROMPT) :].tolist()


class TestFirstBuild:
    def test_it_generates_what_hf_generates(self, first: BuildReport, checkpoint: Path) -> None:
        assert greedy(first.engine) == hf_greedy(checkpoint, torch.float32)

    def test_the_report_lies_beside_the_engine(self, first: BuildReport) -> None:
        report = json.loads(first.engine.with_name("m.engine.report.json").read_text())
        assert report == first.to_json()
        assert report["report_version"] == 1
        assert report["dtype"] == "float32"
        assert report["target"] == f"cpu:{detect_host().level}"
        assert report["limits"] == {
            "max_batch_size": 4, "max_num_tokens": 16, "max_seq_len": 64, "tokens_per_page": 4
        }  # fmt: skip
        assert report["file_bytes"] == {"m.engine": first.engine.stat().st_size}
        assert list(report["stage_seconds"]) == [
            "config",
            "trace",
            "passes",
            "hash",
            "tactics",
            "write",
            "parity",
        ]
        assert all(seconds > 0 for seconds in report["stage_seconds"].values())
        assert report["passes"]["merge_qkv"] == report["passes"]["fuse_gated_mlp"] == 2
        assert report["peak_memory_bytes"] > 50 << 20
        assert report["timed"]
        # 4 sequences of 64 tokens in pages of 4; 2 layers, K and V, 2 heads of 16 floats
        assert report["memory"]["kv_cache_bytes"] == 4 * 16 * (2 * 2 * 2 * 4 * 16 * 4)

    def test_tactics_say_why(self, first: BuildReport) -> None:
        linears = [t for t in first.tactics if t.signature.startswith("linear(")]
        assert {t.rows for t in linears} == {1, 2, 4, 8, 16}
        for timing in first.tactics:
            assert timing.time_us is not None
            assert all(timing.time_us <= us for us in timing.losers.values())
            assert not timing.cached
        known = [set(t.losers) | set(t.rejected) | {t.tactic} for t in linears]
        assert all({"aten", "onednn"} <= names for names in known)

    def test_parity_is_judged(self, first: BuildReport) -> None:
        assert first.parity["verdict"] == "passed"
        assert first.parity["cases"] == {"prompts": 4, "prefill_tokens": 12, "decode_tokens": 6}
        assert first.parity["top1_match"] == 1.0
        assert 0 <= first.parity["mean_logit_difference"] <= first.parity["max_logit_difference"] < 1e-4

    def test_the_manifest_holds_no_figure_of_the_host(self, first: BuildReport, checkpoint: Path) -> None:
        with open_engine(first.engine) as engine:
            manifest = engine.manifest
        assert manifest.parity["verdict"] == "passed"
        assert set(manifest.parity) == {"verdict", "cases", "tolerance"}
        assert manifest.passes == dict(first.passes)
        assert manifest.model.architecture == "LlamaForCausalLM"
        assert manifest.weights["storage"] == "embedded"
        content = first.engine.read_bytes()
        for path in (checkpoint, first.engine.parent, Path.cwd()):
            assert str(path).encode() not in content

    def test_the_engine_holds_the_graph(self, first: BuildReport) -> None:
        with open_engine(first.engine) as engine:
            module = parse(bytes(engine.text("graph.ir")).decode())
            assert [n.op for n in module.nodes] == [r.op for r in engine.program.records]
            assert module.weights.keys() == {w for r in engine.program.records for w in r.weights if w}

    def test_dumps_show_the_graph_after_every_pass(self, first: BuildReport) -> None:
        folder = Path(str(first.options["dump"]))
        names = [p.__name__ for p in PASSES]
        assert listing(folder) == ["00_trace.txt", *(f"{i:02}_{n}.txt" for i, n in enumerate(names, start=1))]
        last = (folder / f"{len(names):02}_{names[-1]}.txt").read_text()
        assert "torch.ops.tapeout.paged_attention.default" in last
        assert "# model.layers.0.self_attn.qkv_proj.weight = concat(" in last
        assert "paged_attention" not in (folder / "00_trace.txt").read_text()


class TestSecondBuild:
    def test_one_cache_gives_one_engine(
        self,
        first: BuildReport,
        checkpoint: Path,
        own_cache: Path,
        tmp_path: Path,
        options: Options,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Byte-identical, from a copy of the model in another folder, and nothing is timed."""
        monkeypatch.setattr(select, "measure", lambda *_: pytest.fail("timed although the cache is warm"))
        moved = shutil.copytree(checkpoint, tmp_path / "moved")
        second = build(str(moved), tmp_path / "other.engine", options(timing_cache=own_cache))
        assert second.engine.read_bytes() == first.engine.read_bytes()
        assert all(t.cached for t in second.tactics)

    def test_shared_weights(
        self, first: BuildReport, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        """Two builds give the same two files; the second keeps the weight file of the first."""
        files = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            report = build(
                str(checkpoint), tmp_path / name / "m.engine", options(weights="shared", verify=False)
            )
            files.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.suffix != ".json"})
            assert set(report.file_bytes) == set(files[-1])
        assert files[0] == files[1]
        assert len(files[0]) == 2
        assert len(files[0]["m.engine"]) < first.file_bytes["m.engine"]
        assert greedy(tmp_path / "a" / "m.engine") == greedy(first.engine)


def test_a_model_without_a_tokenizer(
    checkpoint: Path, own_cache: Path, tmp_path: Path, options: Options, first: BuildReport
) -> None:
    """Told while it is built, also by a dry run, and not when somebody wants to talk to it."""
    assert first.warnings == ()
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("*token*", "vocab*", "merges*"))
    for dry_run in (True, False):
        given = options(timing_cache=own_cache, dry_run=dry_run, verify=False)
        report = build(str(bare), tmp_path / "m.engine", given)
        (warning,) = report.warnings
        assert "comes without a tokenizer" in warning
        assert "`tapeout run --prompt`, chats and stop strings will not work" in warning
        assert "tokenizer.json" in warning, "what to do"
        assert report.to_json()["warnings"] == [warning]
    with LLM(tmp_path / "m.engine") as llm, pytest.raises(UsageError, match="the engine has no tokenizer"):
        llm.generate("hello")


class TestDryRun:
    def test_it_writes_and_times_nothing(
        self, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(select, "measure", lambda *_: pytest.fail("timed in a dry run"))
        before = listing(tmp_path)
        report = build(
            str(checkpoint),
            tmp_path / "m.engine",
            BuildOptions(dry_run=True, timing_cache=tmp_path / "cache.json"),
        )
        assert listing(tmp_path) == before
        assert report.dry_run
        assert not report.timed
        assert report.limits.max_seq_len == 512  # the model's
        tensors = load_file(checkpoint / "model.safetensors")
        parameters = sum(a.nbytes for a in tensors.values())
        assert parameters <= report.memory.weights_bytes <= parameters + 1024
        assert report.memory.total_bytes > report.memory.kv_cache_bytes > report.memory.arena_bytes > 0
        assert report.memory.workspace_bytes == 0  # CPU tactics have none

    def test_the_memory_of_a_gpu_has_the_workspace(
        self, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        """Planned before kernels are compiled: at most what the engine then asks for."""
        chosen: dict[str, Any] = {"target": "cuda:sm_90", "tokens_per_page": 16, "max_seq_len": 512}
        front_end = FrontEnd(str(checkpoint))

        def memory_of(**changes: Any) -> MemoryPlan:
            made = options(**chosen, **changes)
            return build(str(checkpoint), tmp_path / "m.engine", made, front_end=front_end).memory

        planned, memory = memory_of(dry_run=True), memory_of()
        with open_engine(tmp_path / "m.engine") as engine:
            assert engine.launches is not None
            expected = engine.launches.workspace_bytes + engine.launches.scratch_bytes
        assert memory.workspace_bytes == expected >= planned.workspace_bytes > 0
        assert memory.total_bytes - memory.workspace_bytes == planned.total_bytes - planned.workspace_bytes


class TestPrecisions:
    def test_bfloat16_generates_what_hf_does(
        self, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        """Both round to bfloat16 but at other places; the tiny model's margins are wide enough that greedy
        ids agree at least until a near tie, which the build itself judges position by position."""
        report = build(str(checkpoint), tmp_path / "m.engine", options(dtype="bf16"))
        assert report.dtype == "bfloat16"
        assert report.parity["verdict"] == "passed"
        assert report.parity["top1_match"] > 0.8
        assert 1e-4 < report.parity["max_logit_difference"] <= 2 * report.parity["hf_max_logit_difference"]
        ours, theirs = greedy(report.engine), hf_greedy(checkpoint, torch.bfloat16)
        assert ours[:6] == theirs[:6]

    def test_int8_is_near_and_says_so(self, checkpoint: Path, tmp_path: Path, options: Options) -> None:
        report = build(str(checkpoint), tmp_path / "m.engine", options(quantize="int8-dynamic"))
        assert report.parity["verdict"] == "quantized"
        assert report.quantize == "int8-dynamic"
        assert report.passes["quantize_linears"] == 2 * 4 + 1
        # One percent or so a linear, over nine of them in a row.
        assert 0 < report.parity["mean_logit_difference"] < 0.05 * report.parity["max_logit"]
        assert report.parity["top1_match"] > 0.8
        with open_engine(report.engine) as engine:
            assert engine.manifest.parity["verdict"] == "quantized"
            dtypes = {s.weights[0].dtype for s in engine.program.signatures.values() if "linear" in s.op}
        assert dtypes == {"int8"}
        assert len(greedy(report.engine)) == NEW_TOKENS


class TestBadModels:
    def test_every_fault_of_the_checkpoint_is_listed(
        self, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        folder = shutil.copytree(checkpoint, tmp_path / "bad")
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.norm.weight"] = np.ones(65, np.float32)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError) as caught:
            build(str(folder), tmp_path / "m.engine", options())
        assert caught.value.exit_code == 2
        for line in (
            "missing: lm_head.weight [300, 64]",
            "missing: model.layers.0.mlp.up_proj.weight [96, 64]",
            "extra: model.layers.0.self_attn.q_proj.bias [64]",
            "wrong shape: model.norm.weight is [65], expected [64]",
        ):
            assert line in caught.value.message
        assert listing(tmp_path) == ["bad"]

    @pytest.mark.parametrize(
        ("changes", "what"),
        [
            ({"model_type": "no_such_model", "architectures": ["NoSuchModel"]}, "no_such_model"),
            ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "t5"),
            ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ],
    )
    def test_an_architecture_that_is_not_supported(
        self, checkpoint: Path, tmp_path: Path, options: Options, changes: dict[str, Any], what: str
    ) -> None:
        folder = shutil.copytree(checkpoint, tmp_path / "bad")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UnsupportedError, match=what) as caught:
            build(str(folder), tmp_path / "m.engine", options())
        assert caught.value.exit_code == 5
        assert caught.value.hint is not None
        assert listing(tmp_path) == ["bad"]

    def test_an_output_that_cannot_be_written_is_refused_first(
        self, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        with pytest.raises(UsageError, match="does not exist"):
            build("no-such-model", tmp_path / "gone" / "m.engine", options())

    def test_a_cache_that_is_none(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "cache.json").write_text("{")
        with pytest.raises(UsageError, match="is not a timing cache"):
            build(str(checkpoint), tmp_path / "m.engine", BuildOptions(timing_cache=tmp_path / "cache.json"))
        assert listing(tmp_path) == ["cache.json"]

    def test_the_models_own_files_are_not_overwritten(
        self, checkpoint: Path, tmp_path: Path, options: Options
    ) -> None:
        folder = shutil.copytree(checkpoint, tmp_path / "m")
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        (tmp_path / "link").symlink_to("m/model.safetensors")
        outputs = ("m/model.safetensors", "link", "m/tokenizer.json", "m/model.safetensors.index.json")
        for output in outputs:
            with pytest.raises(UsageError, match="an input of the build"):
                build(str(folder), tmp_path / output, options(dry_run=output == "link"))
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    def test_the_options_file_is_not_overwritten(self, tmp_path: Path, options: Options) -> None:
        with pytest.raises(UsageError, match="an input of the build"):
            build("no-model", tmp_path / "m", options(), inputs=(tmp_path / "m.report.json",))
