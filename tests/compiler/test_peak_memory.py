"""Peak memory of a build does not follow the model's size: checkpoints in shards, built in a child."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, VOCAB = 1024, 4096, 2048
LARGEST_FUSED_BYTES = 2 * INTERMEDIATE * HIDDEN * 4  # gate and up, float32

CHILD = """
import sys
from pathlib import Path
from tapeout.compiler.build import build
from tapeout.compiler.options import BuildOptions
from tapeout.compiler.peak_memory import peak_memory_bytes
small, large, folder = map(Path, sys.argv[1:])
peaks = []
for model in (small, large):
    report = build(str(model), folder / f"{model.name}.engine", BuildOptions(
        max_num_tokens=1, max_batch_size=1, max_seq_len=32, timing_cache=folder / "cache.json", verify=True))
    peaks.append(peak_memory_bytes())
print(*peaks, report.memory.weights_bytes)
"""


def write_llama(models: Any, folder: Path, layers: int) -> int:
    """A random llama of 67 MB a layer in one shard each, written tensor by tensor; its bytes."""
    models.make_tiny("llama", folder, num_hidden_layers=layers)
    (folder / "model.safetensors").unlink()
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    projections = {f"self_attn.{x}_proj": (HIDDEN, HIDDEN) for x in "qkvo"} | {
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    draw = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    shards: dict[str, dict[str, np.ndarray]] = {
        "embed": {
            "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
            "lm_head.weight": matrix(VOCAB, HIDDEN),
            "model.norm.weight": np.ones(HIDDEN, np.float32),
        }
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        shards[f"layer{i}"] = {f"{layer}{name}.weight": matrix(*shape) for name, shape in projections.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shards[f"layer{i}"][f"{layer}{name}.weight"] = np.ones(HIDDEN, np.float32)
    index = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_peak_memory(models: Any, tmp_path: Path, preloaded: Callable[[Path], tuple[str, ...]]) -> None:
    """The same ops in more layers: what they are timed with is the same, and the weights are more.

    A shard is small beside the difference, since one that is mapped longer in one build than in the
    other (its pages count as resident) is no growth.
    """
    small_bytes = write_llama(models, tmp_path / "small", 1)
    large_bytes = write_llama(models, tmp_path / "large", 6)
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    child = subprocess.run(
        [*preloaded(program), tmp_path / "small", tmp_path / "large", tmp_path],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    small_peak, large_peak, weights_bytes = map(int, child.stdout.split())
    assert weights_bytes > 0.98 * large_bytes > 340 << 20
    assert large_peak < 2 * LARGEST_FUSED_BYTES + 2 * 10**9
    assert large_peak - small_peak < 0.5 * (large_bytes - small_bytes)
