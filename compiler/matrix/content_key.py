"""The content key of an engine: equal keys mean that building again would give the same engine.

It is made of factors, each a name and a value, so that two keys can be compared and `--explain-key` can show
what one is made of. No factor knows a host, a path, a user or a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tapeout.compiler.limits import resolve_target, target_kind
from tapeout.compiler.matrix.file_digests import FileDigests
from tapeout.compiler.matrix.schema import EngineSpec
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.tactics.cache import TimingCache, cpu_conditions
from tapeout.compiler.tactics.gpu_cache import timings_for
from tapeout.compiler.tactics.gpu_cases import conditions
from tapeout.compiler.targets import cuda_target
from tapeout.model_defs.hub import FILES
from tapeout.model_defs.resolve import locate_model
from tapeout.model_defs.tokenizer_files import TOKENIZER_FILES
from tapeout.plugins.cuda import TENSORRT
from tapeout.plugins.errors import UsageError
from tapeout.plugins.native import detect_host, source_digest
from tapeout.plugins.triton_aot.digest import ptxas_version, triton_version
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.engine.program import Program

#: Changes when factors change their meaning.
KEY_VERSION = "1"
TIMINGS = "timings"

_ROOT = Path(__file__).resolve().parents[2]
#: Folders whose files decide what an engine holds, and what in them does not.
_SOURCES = {"compiler": "compiler/matrix", "model_defs": "", "plugins": "", "runtime/engine": ""}
_SUFFIXES = frozenset({".py", ".toml", ".json", ".jinja"})
_PACKAGES = ("tapeout", "torch", "transformers", "tokenizers", "safetensors", "numpy", "ml_dtypes", "gguf")
_INDEX = "model.safetensors.index.json"
#: Packages that make parts of an engine where `--tactics` names their provider; any of them may be there.
_PROVIDERS = {
    TENSORRT: ("tensorrt", "tensorrt_rtx", "tensorrt-rtx", "onnx", "onnx-graphsurgeon", "polygraphy"),
}
#: Environment variables that change what Triton compiles; those with paths do it through a version.
_COMPILER_VARIABLES = ("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "TRITON_")
_PATHS = ("_DIR", "_PATH", "_HOME", "_CACHE")


def key_of(factors: Mapping[str, str]) -> str:
    """SHA-256 (hex) of the factors."""
    text = json.dumps(dict(sorted(factors.items())), separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def factors_of(spec: EngineSpec, digests: FileDigests) -> dict[str, str]:
    """All factors but the timings, which need the ops of the engine: see `timings_factor`.

    Raises:
        TapeoutError: the model is not there, or no compiler for the target.
    """
    options = spec.options
    target = resolve_target(options, detect_host())
    identity = {name: _text(value) for name, value in options.identity().items() if name != "target"}
    return {
        "key_version": KEY_VERSION,
        "target": target,
        **{f"option.{name}": value for name, value in identity.items()},
        **_model_factors(spec, digests),
        **_compiler_factors(target),
        **_versions(_PROVIDERS.get(options.tactics, ())),
    }


def pack_factors(options: BuildOptions) -> dict[str, str]:
    """What a pack depends on beside its engine: versions of what makes segments that compete."""
    return _versions(_PROVIDERS[TENSORRT]) if options.segments_compete else {}


def timings_factor(options: BuildOptions, program: Program, limits: Limits) -> str:
    """The timings in the engine's timing cache that its tactics are chosen by: a digest, or `none`.

    Of a GPU those of the model that the target means; of a CPU those of any that has the target's
    instruction set, because a set holds one engine for all of them.
    """
    cache = TimingCache.load(options.timing_cache)
    if target_kind(options) == "cuda":
        relevant = _gpu_entries(cache, options, program, limits)
    else:
        relevant = _cpu_entries(cache, program, limits)
    chosen = {key: cache.entries[key] for key in relevant}
    if not chosen:
        return "none"
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def changed_factors(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of factors that differ, sorted."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _gpu_entries(
    cache: TimingCache, options: BuildOptions, program: Program, limits: Limits
) -> Iterable[str]:
    target = options.target
    sm = cuda_target(target).sm
    try:
        timings = timings_for(cache, target, sm)
    except UsageError:  # of several GPUs: only a GPU of this machine, or nothing, could choose by them
        gpus = [entry["gpu"] for entry in cache.entries.values() if "gpu" in entry]
    else:
        gpus = [vars(timings.gpu)] if timings is not None else []
    shaped = {key: conditions(signature, limits) for key, signature in program.signatures.items()}
    order = [record.signature for record in program.records]
    for key, entry in cache.entries.items():
        if entry.get("gpu") not in gpus:
            continue
        of_op = shaped.get(entry.get("signature", "")) == entry.get("conditions")
        # Of any region: which the model has, only its graph tells.
        of_region = "region" in entry and options.segments_compete
        if of_op or of_region or entry.get("order") == order:
            yield key


def _cpu_entries(cache: TimingCache, program: Program, limits: Limits) -> Iterable[str]:
    level = detect_host().level
    fixed = {
        "level": level,
        "kernels": source_digest(level),
        "torch": version("torch"),
        "conditions": cpu_conditions(limits),
    }
    for key, entry in cache.entries.items():
        machine = entry.get("machine", {})
        if entry.get("signature") in program.signatures and fixed.items() <= machine.items():
            yield key


def _model_factors(spec: EngineSpec, digests: FileDigests) -> dict[str, str]:
    """Digests of the files the model is read from, by their names in its folder."""
    code = spec.options.trust_remote_code
    path = locate_model(spec.source, revision=spec.options.revision, with_code=code)
    if path.is_file():
        return {"model": digests.sha256(path)}
    patterns = [*FILES, *TOKENIZER_FILES, *(["*.py", "**/*.py"] if code else [])]
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    found |= {file for name in _shards(path / _INDEX) if (file := path / name).is_file()}
    return {f"model.{file.relative_to(path).as_posix()}": digests.sha256(file) for file in sorted(found)}


def _shards(index: Path) -> set[str]:
    """Weight files that an index names; a damaged one names none and fails the build itself."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _compiler_factors(target: str) -> dict[str, str]:
    """Who builds: our own sources, libraries, the kernels' compiler."""
    factors = {f"source.{folder}": _sources_digest(folder) for folder in _SOURCES}
    factors |= _versions(_PACKAGES)
    if not target.startswith("cuda:"):
        return {**factors, "kernels": source_digest(target.removeprefix("cpu:"))}
    factors |= {"version.triton": triton_version(), "version.ptxas": ptxas_version(cuda_target(target).sm)}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_COMPILER_VARIABLES) and not name.endswith(_PATHS):
            factors[f"environment.{name}"] = value
    return factors


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    return {f"version.{name}": found for name in packages if (found := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _sources_digest(folder: str) -> str:
    """SHA-256 (hex) of a folder's sources by name and content. C files count as kernels of their own."""
    digest, without = hashlib.sha256(), _SOURCES[folder]
    top = _ROOT / folder
    for path in sorted(top.rglob("*")):
        name = path.relative_to(_ROOT).as_posix()
        if path.suffix not in _SUFFIXES or (without and name.startswith(f"{without}/")):
            continue
        text = path.read_bytes()
        digest.update(f"\0{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True) if not isinstance(value, str) else value


def explain(factors: Mapping[str, str], timings: str | None) -> str:
    """The factors as lines for people; `timings` is None where no build has told the ops yet."""
    shown = {**factors, TIMINGS: timings or "known when the engine is built: its ops decide which count"}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in sorted(shown.items()))
