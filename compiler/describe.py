"""What an engine says about itself: manifest, texts, memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType

from tapeout.compiler.ir import IR_TEXT, IR_VERSION, Module
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.report import MemoryPlan
from tapeout.compiler.targets import cuda_target
from tapeout.model_defs import ModelSource
from tapeout.model_defs.architecture import max_positions
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.native import source_digest
from tapeout.plugins.registry import OPS
from tapeout.plugins.triton_aot.digest import ptxas_version, triton_version
from tapeout.runtime.engine.container import tensor_bytes
from tapeout.runtime.engine.manifest import (
    FORMAT_VERSION,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    RegionTime,
    TokenizerFacts,
)
from tapeout.runtime.engine.program import Program
from tapeout.runtime.engine.target import PTXAS


def describe(
    source: ModelSource,
    module: Module,
    options: BuildOptions,
    target: str,
    dtype: str,
    limits: Limits,
    matches: Mapping[str, int],
    timed: bool,
    weights_digest: str,
    packages: Mapping[str, str] = MappingProxyType({}),
    regions: tuple[RegionTime, ...] = (),
) -> Manifest:
    """The manifest, with the comparison still to come.

    `weights_digest` is the checkpoint's own, `packages` are versions of what wrote the segments, `regions`
    what these competed for.
    """
    config = source.config.get_text_config()
    architectures = getattr(source.config, "architectures", None) or [type(source.config).__name__]
    model = ModelFacts(
        architecture=architectures[0],
        model_type=source.config.model_type,
        dtype=dtype,
        quantize=options.quantize,
        vocab_size=int(module.logits.shape[1]),
        max_position_embeddings=max_positions(config),
        checkpoint=f"{source.origin} config:{_config_digest(source)} weights:{weights_digest}",
        stored_types=source.stored_types,
    )
    tokenizer = TokenizerFacts(
        source.tokenizer_vocab_size,
        source.bos_token_id,
        tuple(source.eos_token_ids),
        source.pad_token_id,
        dict(source.special_tokens),
    )
    return Manifest(
        format_version=FORMAT_VERSION,
        target=target,
        model=model,
        limits=limits,
        kv_cache=kv_cache_layout(module),
        tokenizer=None if source.tokenizer_json is None else tokenizer,
        generation=dict(source.generation),
        options=options.identity(),
        versions={**_versions(target), **packages},
        passes=dict(matches),
        parity={"verdict": "pending"},
        timed=timed,
        regions=regions,
    )


def kv_cache_layout(module: Module) -> KvCacheLayout:
    """The cache the module's attention ops share."""
    calls = [n for n in module.nodes if OPS[n.op].reads_cache]
    first = calls[0]
    dtype = module.values()[first.inputs[1].value].dtype
    kv_heads, head_dim = OPS[first.op].cache_shape([o.shape for o in first.inputs])
    return KvCacheLayout(layers=len(calls), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def warnings_of(manifest: Manifest) -> tuple[str, ...]:
    """What the user should know about an engine of this description."""
    if manifest.tokenizer is not None:
        return ()
    text = (
        "the model comes without a tokenizer, so that the engine takes and gives token ids alone: "
        "`tapeout run --prompt`, chats and stop strings will not work; pass prompt_token_ids, or build again "
        "from a checkpoint with its tokenizer.json and tokenizer_config.json"
    )
    return (text,)


def texts_of(source: ModelSource, module: Module) -> dict[str, bytes]:
    """Text sections: the IR, and what the runtime needs to turn text into tokens and back."""
    texts = {IR_TEXT: module.text().encode()}
    if source.tokenizer_json is not None:
        texts["tokenizer.json"] = source.tokenizer_json.encode()
    if source.chat_template is not None:
        texts["chat_template.jinja"] = source.chat_template.encode()
    return texts


def memory_plan(
    weights: Mapping[str, WeightRef], program: Program, manifest: Manifest, workspace_bytes: int
) -> MemoryPlan:
    """Bytes at run time, with a cache in which every request may reach its longest.

    `workspace_bytes` is what the chosen tactics take beside the arena; 0 on CPUs.
    """
    limits = manifest.limits
    return MemoryPlan(
        weights_bytes=sum(tensor_bytes(ref.dtype, ref.shape) for ref in weights.values()),
        arena_bytes=program.arena_bytes,
        kv_cache_bytes=limits.pool_pages * manifest.kv_cache.page_bytes(limits.tokens_per_page),
        workspace_bytes=workspace_bytes,
    )


def _config_digest(source: ModelSource) -> str:
    """Digest of the model's config without what depends on where it was loaded from."""
    data = {
        k: v for k, v in source.config.to_dict().items() if k not in {"_name_or_path", "transformers_version"}
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()


def _versions(target: str) -> dict[str, str]:
    """Everything whose version decides what the engine holds."""
    packages = {name: version(name) for name in ("tapeout", "torch", "transformers")}
    if target.startswith("cuda:"):
        kernels = {"triton": triton_version(), PTXAS: ptxas_version(cuda_target(target).sm)}
    else:
        kernels = {"kernels": source_digest(target.removeprefix("cpu:"))}
    return {**packages, "ir": str(IR_VERSION), **kernels}
