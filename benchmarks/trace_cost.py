"""What tracing costs: CPU seconds and peak memory from a config to lowered IR.

    python benchmarks/trace_cost.py [--model FOLDER]

Without a folder it is the shape of Llama-3.1-8B in bf16: a config, and a safetensors file whose header is
whole and whose bytes are a hole in a sparse file, because tracing reads no weights. Seconds are user CPU
time of this process by stage, so that other work on the machine counts little; memory is its peak.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import struct
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import record

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def write_hollow(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint of this config without any bytes of weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def cpu_seconds() -> float:
    """User CPU time of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def measure(folder: Path) -> dict[str, Any]:
    """Seconds by stage and peak memory of tracing, passes and lowering."""
    marks: list[tuple[str, float, float]] = [("start", cpu_seconds(), time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, cpu_seconds(), time.perf_counter()))

    from tapeout.compiler.front_end import trace_source
    from tapeout.compiler.lower import lower
    from tapeout.compiler.options import BuildOptions
    from tapeout.compiler.peak_memory import peak_memory_bytes
    from tapeout.compiler.pipeline import expected_matches, passes_for, run_passes
    from tapeout.model_defs import open_model

    mark("import")
    source = open_model(str(folder))
    mark("config")
    graph, _ = trace_source(source, "bfloat16")
    nodes = len(graph.graph.nodes)
    mark("trace")
    passes = passes_for(BuildOptions())
    run_passes(graph, passes, expected_matches(source.config, passes))
    module = lower(graph)
    mark("passes")
    pairs = list(pairwise(marks))
    return {
        "user_cpu_seconds": {name: round(cpu - before, 1) for (_, before, _), (name, cpu, _) in pairs},
        "wall_seconds": {name: round(wall - before, 1) for (_, _, before), (name, _, wall) in pairs},
        "peak_memory_mb": round(peak_memory_bytes() / 1e6),
        "nodes_traced": nodes,
        "ops_lowered": len(module.nodes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face directory instead of the 8B shape")
    model = parser.parse_args().model
    where = record.conditions(threads=1)
    with tempfile.TemporaryDirectory() as hollow:
        if model is None:
            write_hollow(Path(hollow), LLAMA_3_1_8B)
        result = measure(model or Path(hollow))
    what = model.name if model else "shape of Llama-3.1-8B, bfloat16, no weights"
    record.write("trace_cost", {"what": what, "conditions": where, **result})


if __name__ == "__main__":
    main()
