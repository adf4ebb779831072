"""A small engine with every section: padded weights, a kernel, texts, one record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.compiler.engine_writer import WriteResult, write_engine
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.runtime.engine import (
    FORMAT_VERSION,
    Buffer,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    Program,
    Record,
    TacticRange,
    TokenizerFacts,
    View,
)

SIGNATURE = OpSignature(
    "linear",
    (TensorType("float32", ("T", 4)),),
    (TensorType("float32", (3, 4)), TensorType("float32", (3,))),
    (TensorType("float32", ("T", 3)),),
)
TEXTS = {"tokenizer.json": '{"größe": 1}'.encode(), "chat_template.jinja": b"{{ x }}"}
KERNELS = {"native.so": bytes(range(256)) * 3}


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        target="cpu:x86_64_v3",
        model=ModelFacts("LlamaForCausalLM", "llama", "float32", "none", 3, 64, "hf:0123"),
        limits=Limits(2, 8, 64, 4),
        kv_cache=KvCacheLayout(1, 1, 4, "float32"),
        tokenizer=TokenizerFacts(3, 1, (2, 0), None, {"bos_token": "<s>"}),
        generation={"temperature": 0.5, "top_k": None},
        options={"dtype": "float32"},
        versions={"tapeout": "0.1.0"},
        passes={"rms_norm": 3, "add_rms_norm": 2},
        parity={"verdict": "skipped"},
        timed=False,
    )


@pytest.fixture
def program() -> Program:
    buffers = (Buffer("x", "float32", ("T", 4), 0, 128), Buffer("y", "float32", ("T", 3), 128, 96))
    x, y = (View(b.name, "float32", b.shape, (b.shape[1], 1)) for b in buffers)  # type: ignore[arg-type]
    record = Record(
        "linear", (x,), ("w", "b"), (y,), {"flag": True, "scale": 1.0, "n": 1, "s": "a"}, SIGNATURE.key()
    )
    logits = View("y", "float32", ("R", 3), (3, 1))
    tactics = {SIGNATURE.key(): (TacticRange(4, "aten"), TacticRange(8, "other"))}
    return Program(256, buffers, (record,), logits, {SIGNATURE.key(): SIGNATURE}, tactics)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((3, 4), np.float32),
        "b": rng.standard_normal(3, np.float32),  # 12 bytes: the next one needs padding
        "wide": rng.standard_normal((5, 3)).astype(ml_dtypes.bfloat16),
        "eight": np.arange(-5, 5, dtype=np.int8),
    }


WriteTiny = Callable[..., WriteResult]


@pytest.fixture
def write_tiny(manifest: Manifest, program: Program, arrays: dict[str, np.ndarray]) -> WriteTiny:
    """Writes the engine; keyword arguments replace the defaults."""

    def write(path: Path, **changes: Any) -> WriteResult:
        infos = {n: TensorInfo(n, a.dtype.name, a.shape) for n, a in arrays.items()}
        arguments: dict[str, Any] = {
            "manifest": manifest,
            "program": program,
            "weights": {n: WeightRef.of(i) for n, i in infos.items()},
            "read": lambda name: arrays[name],
            "kernels": KERNELS,
            "texts": TEXTS,
            "source_digest": "source",
        }
        return write_engine(path, **(arguments | changes))

    return write


@pytest.fixture
def engine_path(tmp_path: Path, write_tiny: WriteTiny) -> Path:
    path = tmp_path / "tiny.engine"
    write_tiny(path)
    return path
