"""Make what tests/gpu needs on a GPU machine: `make gpu-bundle`, or `python tests/gpu/make_bundle.py --help`.

Runs where the compiler is; no GPU is needed. What was made with the same sources and options is kept,
so a second run makes only what changed. Work that does not travel stays in build/gpu-work.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gpu_bundle
from gpu_bfloat16 import CONFIG, answers_name, engine_name
from gpu_bundle import DTYPES, ENGINES, NEW_TOKENS, PACKED, ROOT, SMALL, TINY, WIDE, code_digest, pack_engines
from gpu_cases import CASES, LIMITS, PAGES, kind_of, logits_of_steps, run_case, to_json
from gpu_families import ANSWERS, FAMILIES, REFUSED, family_file
from make_bfloat16 import make_bfloat16
from make_families import build_tiny, make_families, part_of

from tapeout.runtime import LLM, SamplingParams
from tapeout.runtime.engine import open_engine
from tapeout.runtime.executors import load_executor

# The compiler is imported where it is used: processes that compile kernels import this file, too.
if TYPE_CHECKING:
    from tapeout.compiler.tactics.gpu_contests import Contest

WORK = ROOT / "build" / "gpu-work"
SMOLLM2_LIMITS = {"max_batch_size": 8, "max_num_tokens": 512, "max_seq_len": 512, "tokens_per_page": 32}
PACK_LIMITS = {"max_batch_size": 8, "max_num_tokens": 128, "max_seq_len": 512}
#: More tokens a step than any GPU has memory for.
HUGE = {"max_num_tokens": 2**24}
SAMPLED = {
    "english": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "code": {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    "chat": {"temperature": 0.7, "min_p": 0.05, "seed": 3},
    "page": {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "seed": 4},
}
#: Parts that are joined into one file, or only say that something was checked.
_STAYS = ("family_", "refused_")
#: Sources that say nothing of what a CPU engine answers.
_GPU_ONLY = ("cli/", "plugins/triton_aot/", "plugins/tactic_check/", "runtime/bench/",
             "runtime/tactic_timer/", "runtime/executors/cuda/", "compiler/tactics/gpu_",
             "compiler/time_into_cache.py")  # fmt: skip


@dataclass(frozen=True)
class Item:
    """Files of the bundle, what they depend on, and how to make them."""

    outputs: tuple[str, ...]
    key: str
    make: Callable[[], None]


class Maker:
    """Makes items into the bundle's folder."""

    def __init__(self, target: str) -> None:
        from tapeout.compiler.targets import cuda_target

        self.target, self.sm = target, cuda_target(target).sm
        self.bundle, self.folder = gpu_bundle.folder(), WORK / "parts"
        stamps = WORK / "stamps.json"
        self.stamps: dict[str, str] = json.loads(stamps.read_text()) if stamps.is_file() else {}
        self.models = load_module(ROOT / "tests" / "models.py")
        self.gguf = self.models.smollm2_gguf()
        versions = [importlib.metadata.version(n) for n in ("torch", "transformers", "triton")]
        self.code = code_digest()
        self.all_key = digest(self.code, target, versions)
        self.cpu_key = digest(code_digest(says_cpu_ids), versions)
        reference = (ROOT / "tests" / "e2e" / "reference.py").read_text()
        self.hf_key = digest(file_digest(self.gguf), reference, versions)

    def items(self) -> Iterable[Item]:
        for name in TINY:
            yield Item((f"{name}.json",), self.cpu_key, lambda name=name: self.tiny_answers(name))
            yield Item((f"{name}.engine",), self.all_key, lambda name=name: self.tiny_engine(name))
        yield Item(("invariant.engine",), self.all_key, self.invariant)
        yield Item(("cublaslt.engine",), self.all_key, self.cublaslt)
        yield Item(("cublaslt.json",), self.cpu_key, self.cublaslt_answers)
        yield Item(("other_sm.engine",), self.all_key, self.other_sm)
        yield Item(("huge.engine",), self.all_key, self.huge)
        for dtype in DTYPES:
            yield Item((f"{dtype}.pack",), digest(self.all_key, PACKED), lambda dtype=dtype: self.pack(dtype))
        for name in CONFIG:
            files = (engine_name(name), answers_name(name))
            yield Item(files, self.all_key, lambda name=name: self.bfloat16(name))
        yield Item(("smollm2_hf.json",), self.hf_key, self.smollm2_hf)
        yield Item(("smollm2_cpu.json",), digest(self.cpu_key, self.hf_key), self.smollm2_cpu)
        for dtype in DTYPES:
            key = digest(self.all_key, self.hf_key)
            yield Item((f"smollm2_{dtype}.engine",), key, lambda dtype=dtype: self.smollm2_engine(dtype))

    # ---- tiny models ----------------------------------------------------------------------

    def tiny(self, name: str, **overrides: Any) -> str:
        model_type, own = TINY.get(name, (name, {}))
        return str(self.models.make_tiny(model_type, WORK / "model", **{**own, **overrides}))

    def tiny_answers(self, name: str) -> None:
        engine = WORK / "cpu.engine"
        self.build(self.tiny(name), engine, "cpu", "float32")
        answers: dict[str, Any] = {}
        for case in CASES:
            steps: list[Any] = []
            with LLM(engine, on_step=steps.append, **case.options) as llm:
                answers[case.name] = to_json(run_case(llm, case))
            missing = case.steps - set(map(kind_of, steps))
            assert not missing, f"{case.name}: no {', '.join(missing)} step"
        self.write_json(f"{name}.json", answers)

    def tiny_engine(self, name: str) -> None:
        self.build(self.tiny(name), self.folder / f"{name}.engine", self.target, "float32")

    def invariant(self) -> None:
        path = self.folder / "invariant.engine"
        self.build(self.tiny("llama", **SMALL), path, self.target, "bfloat16", batch_invariant=True)

    def cublaslt(self) -> None:
        """By a timing cache that says cuBLASLt won everywhere, with an algorithm that no library has."""
        from tapeout.compiler.front_end import Stages, lower_model
        from tapeout.compiler.plan import signatures_of
        from tapeout.compiler.progress import SilentProgress
        from tapeout.compiler.tactics.cache import TimingCache
        from tapeout.compiler.tactics.gpu_cache import Gpu, GpuTimings
        from tapeout.compiler.tactics.gpu_contests import contests
        from tapeout.compiler.tactics.outcome import Outcome
        from tapeout.compiler.targets import cuda_target
        from tapeout.plugins.cuda import CUBLASLT, MatmulAlgorithm
        from tapeout.plugins.linear.cublaslt import WORKSPACE_BYTES

        model, path = self.tiny("llama", **WIDE), WORK / "cublaslt_won.json"
        path.unlink(missing_ok=True)
        changes = {"tactics": CUBLASLT, "timing_cache": path}
        options = self.options(self.target, "bfloat16", **changes)
        target = replace(cuda_target(self.target), tokens_per_page=options.tokens_per_page)
        lowered = lower_model(model, options, Stages(SilentProgress()), lambda _: None)
        cache = TimingCache(path)
        gpu = Gpu(f"NVIDIA {self.target.removeprefix('cuda:').upper()}", self.sm, target.sm_count, 1)
        timings, unknown = GpuTimings(cache, gpu), MatmulAlgorithm("00" * 64, 130000, WORKSPACE_BYTES)
        for found in contests(
            signatures_of(lowered.module), lowered.limits, target, providers=options.providers
        ):
            place = (found.key, found.kind, found.conditions, found.rows)
            for c in found.contenders:
                if c.provider == CUBLASLT:
                    timings.put(*place, c.kernel_hash, c.name, Outcome(1.0, None, unknown))
        cache.save()
        self.build(model, self.folder / "cublaslt.engine", self.target, "bfloat16", **changes)

    def cublaslt_answers(self) -> None:
        made = WORK / "cpu.engine"
        self.build(self.tiny("llama", **WIDE), made, "cpu", "float32")
        with open_engine(made) as engine:
            executor = load_executor(engine, num_pages=PAGES * LIMITS["max_batch_size"])
            answers = {name: logits.tolist() for name, logits in logits_of_steps(executor).items()}
            executor.close()
        self.write_json("cublaslt.json", answers)

    def bfloat16(self, name: str) -> None:
        made = make_bfloat16(name, self.target, self.folder / engine_name(name), WORK)
        self.write_json(answers_name(name), made)

    def other_sm(self) -> None:
        other = "cuda:sm_80" if self.sm != 80 else "cuda:sm_90"
        self.build(self.tiny("llama"), self.folder / "other_sm.engine", other, "float32")

    def huge(self) -> None:
        model = self.tiny("llama", num_hidden_layers=2, intermediate_size=2048)
        self.build(model, self.folder / "huge.engine", self.target, "float32", **HUGE)

    def pack(self, dtype: str) -> None:
        """All tactics of a Llama, and of other architectures those that are no product with a weight; the
        Llama's whole steps of which all is packed."""
        from tapeout.compiler.front_end import Stages, lower_model
        from tapeout.compiler.plan import order_of, signatures_of
        from tapeout.compiler.progress import SilentProgress
        from tapeout.compiler.tactics.gpu_contests import contests
        from tapeout.compiler.tactics.gpu_pack import make_pack, write_pack
        from tapeout.compiler.tactics.gpu_steps import place_of, step_contests
        from tapeout.compiler.targets import cuda_target

        options = self.options(self.target, dtype, **PACK_LIMITS)
        target = replace(cuda_target(self.target), tokens_per_page=options.tokens_per_page)
        found, steps = {}, []
        for name, config in PACKED.items():
            lowered = lower_model(
                self.tiny(name, **config), options, Stages(SilentProgress()), lambda _: None
            )
            signatures, limits = signatures_of(lowered.module), lowered.limits
            decisions = contests(signatures, limits, target, providers=options.providers)
            packed = [c for c in decisions if is_packed(name, c)]
            found |= {place_of(contest): contest for contest in packed}
            if name == "llama":
                steps = [
                    step
                    for step in step_contests(signatures, order_of(lowered.module), decisions, limits)
                    if all(place_of(contest) in found for contest in step.contests)
                ]
        file = make_pack(list(found.values()), lowered.limits, target, self.target, steps=steps)
        write_pack(file, self.folder / f"{dtype}.pack")

    def build(self, model: str, path: Path, target: str, dtype: str, **changes: Any) -> None:
        build_tiny(model, path, target, WORK / "timings.json", dtype=dtype, **{**LIMITS, **changes})

    def options(self, target: str, dtype: str, **changes: Any) -> Any:
        from tapeout.compiler.options import BuildOptions

        given = {**LIMITS, "target": target, "dtype": dtype, "timing_cache": None, "verify": False}
        return BuildOptions(**{**given, **changes})

    # ---- SmolLM2 --------------------------------------------------------------------------

    def smollm2_hf(self) -> None:
        """Hugging Face's greedy ids, the gaps that decided them, and what its bfloat16 differs there."""
        module = load_module(ROOT / "tests" / "e2e" / "reference.py")
        reference = module.make_reference(str(self.gguf))
        half = module.hf_model(reference.source, "bfloat16")
        answers = {}
        for name, prompt in reference.prompts.items():
            logits, greedy = reference.logits[name], reference.greedy[name]
            assert logits.argmax(-1).tolist() == greedy, f"{name}: HF's generate and forward differ"
            best = logits.topk(2).values
            errors = (reference._along(half, name) - logits).abs().amax(-1)
            answers[name] = {
                "prompt": prompt,
                "greedy": greedy,
                "gaps": (best[:, 0] - best[:, 1]).tolist(),
                "bf16_errors": errors.tolist(),
            }
            assert len(greedy) == NEW_TOKENS
        self.write_json("smollm2_hf.json", answers)

    def smollm2_cpu(self) -> None:
        """Sampled ids of the CPU engine."""
        prompts = json.loads((self.folder / "smollm2_hf.json").read_text())
        engine, answers = WORK / "cpu.engine", {}
        self.build(str(self.gguf), engine, "cpu", "float32", **SMOLLM2_LIMITS)
        with LLM(engine) as llm:
            for name, params in SAMPLED.items():
                given = {**params, "max_tokens": 48, "ignore_eos": True}
                (output,) = llm.generate(
                    {"prompt_token_ids": prompts[name]["prompt"]}, SamplingParams(**given)
                )
                answers[name] = {"params": given, "ids": list(output.outputs[0].token_ids)}
        self.write_json("smollm2_cpu.json", answers)

    def smollm2_engine(self, dtype: str) -> None:
        """The engine alone: its weight file is made on the GPU machine."""
        made = WORK / dtype / "smollm2.engine"
        shutil.rmtree(made.parent, ignore_errors=True)
        made.parent.mkdir()
        self.build(str(self.gguf), made, self.target, dtype, weights="shared", **SMOLLM2_LIMITS)
        made.rename(self.folder / f"smollm2_{dtype}.engine")
        shutil.rmtree(made.parent)

    # ---- files ----------------------------------------------------------------------------

    def write_json(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def run(self) -> None:
        """Make the parts that are missing or out of date, and the bundle of them all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.bundle.mkdir(parents=True, exist_ok=True)
        items = list(self.items())
        families = {name: self.family_parts(name) for name in (*FAMILIES, *REFUSED)}
        stale = [name for name, outputs in families.items() if self.begin(outputs, self.all_key)]
        failed = []
        for made in make_families(stale, self.target, self.folder, WORK / "families"):
            if made.problem:
                failed.append(f"{made.name}: {made.problem}")
                continue
            self.finish(families[made.name], self.all_key, made.seconds)
        if failed:
            sys.exit("\n".join([*failed, f"{len(failed)} families could not be made"]))
        for item in items:
            if self.begin(item.outputs, item.key):
                start = time.monotonic()
                item.make()
                self.finish(item.outputs, item.key, time.monotonic() - start)
        parts = [name for outputs in (*families.values(), *(i.outputs for i in items)) for name in outputs]
        index = {
            "target": self.target,
            "sm": self.sm,
            "code": self.code,
            "smollm2_bytes": self.gguf.stat().st_size,
            "parts": digest([self.stamps[name] for name in sorted(parts)]),
        }
        bundled = self.bundle / "bundle.json"
        if not bundled.is_file() or json.loads(bundled.read_text()) != index:
            self.publish(sorted(parts), index)

    def family_parts(self, name: str) -> tuple[str, ...]:
        return (part_of(name),) if name in REFUSED else (part_of(name), family_file(name).engine)

    def begin(self, outputs: tuple[str, ...], key: str) -> bool:
        """Whether parts must be made; what is there of them is out of date then, and goes."""
        there = all((self.folder / name).is_file() for name in outputs)
        if there and all(self.stamps.get(name) == key for name in outputs):
            return False
        (self.bundle / "bundle.json").unlink(missing_ok=True)
        for name in outputs:
            (self.folder / name).unlink(missing_ok=True)
        return True

    def finish(self, outputs: tuple[str, ...], key: str, seconds: float) -> None:
        self.stamps.update(dict.fromkeys(outputs, key))
        (WORK / "stamps.json").write_text(json.dumps(self.stamps, indent=1))
        print(f"made {', '.join(outputs)}  {seconds:.1f} s", flush=True)

    def publish(self, parts: list[str], index: dict[str, Any]) -> None:
        """Replace the bundle by one of these parts; its index is the last file to appear."""
        for path in self.bundle.iterdir():
            path.unlink()
        pack_engines([self.folder / n for n in parts if n.endswith(".engine")], self.bundle / ENGINES)
        families = {n: json.loads((self.folder / f"family_{n}.json").read_text()) for n in FAMILIES}
        (self.bundle / ANSWERS).write_text(json.dumps(families))
        for name in parts:
            if not name.endswith(".engine") and not name.startswith(_STAYS):
                shutil.copyfile(self.folder / name, self.bundle / name)
        (self.bundle / "bundle.json").write_text(json.dumps(index))


def is_packed(model: str, contest: Contest) -> bool:
    """A few of the buckets, or there are thousands of candidates: between them they hold all tactics."""
    op, rows, attrs = contest.signature.op, contest.rows, contest.signature.attrs
    if op == "paged_latent_attention" or attrs.get("alibi"):  # splits differ by rows
        return rows in (1, 8, 128)
    if model != "llama":
        return rows == 8 and "linear" not in op
    return rows in ((1, 128) if "linear" in op else (1, 8, 128))


def says_cpu_ids(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not path.startswith(_GPU_ONLY) and name != "cuda.py" and not name.startswith("triton")


def load_module(path: Path) -> ModuleType:
    """A helper of other tests, by its path."""
    spec = importlib.util.spec_from_file_location(f"tapeout_gpu_bundle_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make the bundle that `make test-gpu` runs on a GPU machine."
    )
    parser.add_argument("--target", default="cuda:sm_90", help="target of its engines [default: cuda:sm_90]")
    maker = Maker(parser.parse_args().target)
    maker.run()
    sizes = [path.stat().st_size for path in maker.bundle.iterdir()]
    print(f"{maker.bundle}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, for {maker.target}")
    print(f"take along: this checkout, that folder, and {maker.gguf}")
    print("as build/gpu-model/model.gguf (whole, or in parts model.gguf.partaa, ...); then `make test-gpu`")


if __name__ == "__main__":
    main()
