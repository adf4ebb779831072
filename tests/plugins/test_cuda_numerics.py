"""Every CUDA kernel against its op's reference, in Triton's interpreter on the CPU.

Windows of wider rows, poisoned outputs and workspace, guard rows, padded buckets, stale step
arrays, NaN in unused cache: see plugins/triton_aot/bound_case.py. The GPU runs the same kernels
at real sizes with benchmarks/check_kernels_cuda.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tapeout.plugins.case import cases
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS, cuda_tactics

_HERE = Path(__file__).parent
_NOT_ON_CUDA = {"linear_int8"}

#: Programs of the interpreter to run, each a few seconds: op/tactic@label:every-nth-case.
_GROUPS = {
    "elementwise": (
        "add/:9", "mul/:9", "scale/:7", "copy/:5", "activation/:17", "gated_activation/:13", "embedding/:3",
        "select_rows/:3", "mul_weight/:5", "xielu/:3",
    ),
    "rows": ("rms_norm/:11", "add_rms_norm/:11", "layer_norm/:9", "rope_table/:3", "rope/:5"),
    "experts": ("moe_router/:5", "moe_experts/grouped_16x64x64:5"),
    "linear": (
        "linear/skinny_64x64x128:41", "linear/split4:3", "linear/tiled:43", "linear/tma:33",
        "linear/gemv_8:95", "linear/gemv_8x1024_w4s3@float32 61x77 bias",
    ),
    # Of a gemv few rows alone (even strides): the interpreter takes its rows one by one.
    "fused linear": (
        "norm_linear/gemv_8x1024_w4s3:29", "norm_linear/skinny_64x64x128_w4s4:23",
        "linear_add/gemv_8x1024_w4s3:29", "linear_add/tma_64x64x128:31",
    ),
    "rope attention": (
        "rope_attention/decode_turned_64_w4s2", "rope_attention/decode_early_64_w4_x1",
        "rope_attention/decode_64:3",
        "rope_attention/packed_64x64_w4s2:5", "rope_attention/context_64x64_w4s2:9",
        "rope_attention/tiled:9",
    ),
    "attention": (
        "paged_attention/tiled:17", "paged_attention/context_64x64_w4s2:9", "paged_attention/decode_64:3",
        "paged_attention/packed_64x64_w4s2:9",
    ),
    "ALiBi": (
        "paged_attention/tiled@ALiBi:2", "paged_attention/context_64x64_w4s2@ALiBi:4",
        "paged_attention/decode_64@ALiBi",
    ),
    "latent attention": ("paged_latent_attention/rows_64x64:3", "paged_latent_attention/split_16x16:3"),
}  # fmt: skip


def interpret(script: str, *arguments: str, timeout: int = 600) -> list[dict]:
    command = [sys.executable, "-W", "ignore", script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=_HERE, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def ops_of(group: str) -> set[str]:
    return {program.partition("/")[0] for program in _GROUPS[group]}


@pytest.fixture(scope="module")
def interpreted(request: pytest.FixtureRequest) -> list[dict]:
    """What came of all programs that selected tests look at; one process, since starting it takes seconds."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = {call.params.get("group") for call in calls}
    programs = [program for group in _GROUPS if group in chosen for program in _GROUPS[group]]
    return interpret("interpret_cuda.py", *programs, timeout=1800)


@pytest.mark.parametrize("group", _GROUPS)
def test_kernels_match_the_reference(interpreted: list[dict], group: str) -> None:
    rows = [r for r in interpreted if r["op"] in ops_of(group)]
    assert {r["op"] for r in rows} == ops_of(group)
    assert not [r for r in rows if r["problem"] is not None]
    assert len(rows) >= len(_GROUPS[group])


def test_sampling_equals_the_numpy_sampler() -> None:
    rows = interpret("interpret_sample.py") + interpret("interpret_inbox.py")
    assert len(rows) > 200
    assert not [r for r in rows if r["got"] != r["expected"]]


@pytest.mark.parametrize("op_name", sorted(set(OPS) - TRACE_ONLY_OPS - _NOT_ON_CUDA))
@pytest.mark.parametrize("sm", [80, 90])
def test_some_tactic_runs_every_case_of_usual_shape(op_name: str, sm: int) -> None:
    assert any(t.batch_invariant and not t.decode_only and not t.max_rows for t in cuda_tactics(op_name))
    names = [t.name for t in cuda_tactics(op_name)]
    assert len(set(names)) == len(names)
    for case in cases(op_name):
        types = (*case.signature.inputs, *case.signature.outputs)
        odd = any(t.dtype == "int64" or (len(t.shape) > 2 and int(t.shape[-1]) % 16) for t in types)
        page_is_odd = case.tokens_per_page & (case.tokens_per_page - 1)
        reasons = [
            t.unsupported(case.signature, CudaTarget(sm, 100, 166912, case.tokens_per_page))
            for t in cuda_tactics(op_name)
            if not t.decode_only
        ]
        assert all(reasons) if odd or page_is_odd else not all(reasons), (case.label, reasons)
