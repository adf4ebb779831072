"""One variant of every CUDA kernel, and recording what each occupies: `python cuda_variants.py` writes
cuda_limits.json after a kernel or Triton has changed on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tapeout.plugins.case import signature
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.cuda import NATIVE, CudaTarget, KernelSpec, LaunchSpec
from tapeout.plugins.op import AttrValue
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.sample.cuda import receive_launch, sample_launches
from tapeout.plugins.triton_aot import CompiledKernel, compile_all, kernel_resources

LIMITS = Path(__file__).with_name("cuda_limits.json")
SMS = (80, 89, 90, 100, 120)
ROWS = 8  # few enough that attention is split
#: Shared memory one block may have, by SM.
SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def target(sm: int) -> CudaTarget:
    return CudaTarget(sm, 100, SHARED_BYTES[sm])


def signatures() -> tuple[OpSignature, ...]:
    """An op of Llama-3.1-8B's shape for every kernel."""

    def act(*shape: int) -> TensorType:
        return TensorType("bfloat16", ("T", *shape))

    norm: dict[str, AttrValue] = {"eps": 1e-5, "weight_offset": 0.0, "cast_before_weight": True}
    attention: dict[str, AttrValue] = {"layer": 0, "scale": 0.1, "window": 0, "softcap": 0.0, "alibi": False}
    ids, row, gain = TensorType("int32", ("T",)), act(4096), (TensorType("bfloat16", (4096,)),)
    one, slopes = TensorType("bfloat16", (1,)), TensorType("float32", (32,))
    return (
        signature("embedding", (ids,), (row,), (TensorType("bfloat16", (128256, 4096)),)),
        signature("add", (row, row), (row,)),
        signature("scale", (row,), (row,), attrs={"factor": 0.5}),
        signature("copy", (act(8, 128),), (act(8, 128),)),
        signature("copy", (act(128, 2, 32),), (act(128, 2, 32),)),
        signature("activation", (row,), (row,), attrs={"kind": "gelu_tanh"}),
        signature("xielu", (row,), (row,), (one,) * 4),
        signature("mul_weight", (row,), (row,), gain),
        signature("gated_activation", (act(28672),), (act(14336),), attrs={"activation": "silu"}),
        signature("rms_norm", (row,), (row,), gain, norm),
        signature("add_rms_norm", (row, row), (row, row), gain, norm),
        signature("layer_norm", (row,), (row,), gain * 2, {"eps": 1e-5}),
        signature("moe_router", (act(64),), (TensorType("int32", ("T", 8)), TensorType("float32", ("T", 8))),
                  attrs={"chosen": 8, "scoring": "softmax", "groups": 1, "chosen_groups": 1,
                         "group_by": "best", "normalize": True, "scale": 1.0}),
        signature("moe_experts", (act(2048), TensorType("int32", ("T", 8)), TensorType("float32", ("T", 8))),
                  (act(2048),),
                  tuple(TensorType("bfloat16", (64, 2048, n)) for n in (2048, 1024)),
                  {"activation": "silu", "gated": True, "has_bias": False, "alpha": 0.0, "limit": 0.0}),
        signature("moe_experts", (act(2880), TensorType("int32", ("T", 4)), TensorType("float32", ("T", 4))),
                  (act(2880),),
                  tuple(TensorType("bfloat16", (32, *n))
                        for n in ((5760, 2880), (2880, 2880), (5760,), (2880,))),
                  {"activation": "swiglu_clamped", "gated": True, "has_bias": True, "alpha": 1.702,
                   "limit": 7.0}),
        signature("rope_table", (ids,), (act(128),), (TensorType("float32", (64,)),),
                  {"scaling": 1.0, "dtype": "bfloat16"}),
        signature("rope", (act(40, 128), act(128)), (act(40, 128),), attrs={"interleaved": False}),
        signature("linear", (row,), (act(6144),), (TensorType("bfloat16", (6144, 4096)),)),
        signature("norm_linear", (row,), (act(14336),), (*gain, TensorType("bfloat16", (28672, 4096))),
                  {**norm, "activation": "silu"}),
        signature("linear_add", (act(14336), row), (row,), (TensorType("bfloat16", (4096, 14336)),)),
        signature("paged_attention", (act(32, 128), *[act(8, 128)] * 2), (act(32, 128),), attrs=attention),
        signature("paged_attention", (act(32, 128), *[act(8, 128)] * 2), (act(32, 128),), (slopes,),
                  {**attention, "alibi": True}),
        # Of DeepSeek V3's shape.
        signature("paged_latent_attention", (act(128, 128), act(128, 64), act(512), act(64)),
                  (act(128, 128),), (TensorType("bfloat16", (128, 128, 512)),) * 2,
                  {"layer": 0, "scale": 0.1, "window": 0}),
        signature("rope_attention", (act(32, 128), *[act(8, 128)] * 2, act(128)), (act(32, 128),), (),
                  {**attention, **norm, "interleaved": False, "qk_norm": False}),
    )  # fmt: skip


def launches(sm: int, rows: int = ROWS) -> list[LaunchSpec]:
    """Every launch of every tactic for `signatures`, and of sampling."""
    logits = TensorType("bfloat16", ("R", 128256))
    found = [
        receive_launch(2048, 64, 8192, 32),
        *(s for full in (False, True) for s in sample_launches(logits, rows, 128000, full=full)),
    ]
    for types in signatures():
        for tactic in cuda_tactics(types.op):
            if tactic.provider == NATIVE and tactic.unsupported(types, target(sm)) is None:
                found += tactic.launches(types, rows, target(sm))
    return found


def variants(sm: int) -> dict[str, KernelSpec]:
    """The first spec of every kernel function, by name; of sampling, experts and attention, both kinds."""
    found: dict[str, KernelSpec] = {}
    for spec in (launch.kernel for launch in launches(sm)):
        kinds = {"FULL": ", full", "HAS_BIAS": ", biased", "ALIBI": ", ALiBi"}
        kind = "".join(word for name, word in kinds.items() if spec.constants.get(name))
        found.setdefault(f"{spec.module.removeprefix('tapeout.plugins.')}:{spec.function}{kind}", spec)
    return found


def occupied(names: Sequence[str], kernels: Sequence[CompiledKernel]) -> dict[str, dict[str, int]]:
    return {
        name: {**vars(kernel_resources(k)), "shared_bytes": k.shared_bytes}
        for name, k in zip(names, kernels, strict=True)
    }


def main() -> None:
    recorded = {}
    for sm in SMS:
        chosen = variants(sm)
        recorded[str(sm)] = occupied(list(chosen), compile_all(list(chosen.values()), sm))
    LIMITS.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
