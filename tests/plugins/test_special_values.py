"""NaN and infinity survive, stale memory stays out, bad ids do not crash."""

from __future__ import annotations

import pytest
import torch

from tapeout.plugins.cpu import BoundCall
from tapeout.plugins.example import example_step
from tapeout.plugins.native import NativeLibrary
from tapeout.plugins.registry import cpu_tactics


def _run(
    op: str,
    tactic: str,
    inputs: tuple,
    weights: tuple,
    out: torch.Tensor,
    kernels: NativeLibrary,
    **attrs: object,
) -> torch.Tensor:
    chosen = next(t for t in cpu_tactics(op) if t.name == tactic)
    step = attrs.pop("step", None)
    chosen.bind(BoundCall(inputs, weights, (out,), attrs, step, kernels))()  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["linear", "linear_int8"])
def test_one_bad_row_spoils_only_itself(
    op: str, dtype: torch.dtype, bad: float, kernels: NativeLibrary
) -> None:
    x = torch.randn(5, 40).to(dtype)
    clean = x.clone()
    x[2, 17] = bad
    weights: tuple = (torch.randn(30, 40).to(dtype), None)
    if op == "linear_int8":
        weights = (torch.randint(-127, 128, (30, 40), dtype=torch.int8), torch.rand(30), None)
    for tactic in ("aten", "native"):
        out = _run(op, tactic, (x,), weights, torch.empty(5, 30, dtype=dtype), kernels)
        expected = _run(op, tactic, (clean,), weights, torch.empty(5, 30, dtype=dtype), kernels)
        assert not torch.isfinite(out[2]).any()
        assert torch.equal(out[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid"])
def test_activation_of_extremes(kind: str, kernels: NativeLibrary) -> None:
    extremes = [
        0.0,
        1e-30,
        1e-6,
        -1e-6,
        20.0,
        -20.0,
        88.0,
        -88.0,
        104.0,
        -104.0,
        1e30,
        -1e30,
        torch.inf,
        torch.nan,
    ]
    x = torch.tensor([extremes])
    native = _run("activation", "native", (x,), (), torch.empty_like(x), kernels, kind=kind)
    aten = _run("activation", "aten", (x,), (), torch.empty_like(x), kernels, kind=kind)
    torch.testing.assert_close(
        native, aten, rtol=4e-6, atol=1e-30 if kind in ("silu", "tanh") else 1e-7, equal_nan=True
    )


def test_int8_extremes_do_not_saturate(kernels: NativeLibrary) -> None:
    x = torch.tensor([[1.0, -1.0] * 320])
    weight = torch.tensor([[127, -127] * 320, [-128, 127] * 320], dtype=torch.int8)
    out = _run("linear_int8", "native", (x,), (weight, torch.ones(2), None), torch.empty(1, 2), kernels)
    torch.testing.assert_close(out, torch.tensor([[127.0 * 640, -255.0 * 320]]), rtol=1e-6, atol=0)


def test_bad_token_id_gives_nan_and_no_crash(kernels: NativeLibrary) -> None:
    ids = torch.tensor([1, -1, 1 << 30, 0], dtype=torch.int32)
    out = _run("embedding", "native", (ids,), (torch.randn(3, 8),), torch.empty(4, 8), kernels)
    assert out[[1, 2]].isnan().all()
    assert torch.isfinite(out[[0, 3]]).all()


@pytest.mark.parametrize("tactic", ["aten", "gather_sdpa", "native"])
def test_attention_spoils_only_the_sequence_with_nan(tactic: str, kernels: NativeLibrary) -> None:
    step = example_step(
        [(3, 10), (1, 40), (4, 4)], kv_heads=2, head_dim=16, dtype="float32", tokens_per_page=16
    )
    q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    kv[3, 1, 5] = torch.nan
    attrs = {"layer": 0, "scale": 0.25, "window": 0, "softcap": 0.0, "alibi": False, "step": step}
    out = _run("paged_attention", tactic, (q, kv, kv), (), torch.empty_like(q), kernels, **attrs)
    assert torch.isfinite(out[[0, 1, 2, 4, 5, 6, 7]]).all()
    assert torch.isfinite(out[3, :2]).all(), "query heads of the other kv head"
    assert out[3, 2:].isnan().all()


def test_attention_survives_huge_and_infinite_scores(kernels: NativeLibrary) -> None:
    for factor in (1e4, 1e18, 1e25):
        step = example_step([(40, 40)], kv_heads=1, head_dim=8, dtype="float32")
        q, k, v = (torch.randn(40, 1, 8) for _ in range(3))
        attrs = {"layer": 0, "scale": 1.0, "window": 0, "softcap": 0.0, "alibi": False, "step": step}
        results = [
            _run("paged_attention", t, (q * factor, k * factor, v), (), torch.empty_like(q), kernels, **attrs)
            for t in ("aten", "native")
        ]
        finite = torch.isfinite(results[0]).all(-1)
        torch.testing.assert_close(results[1][finite], results[0][finite], rtol=1e-4, atol=1e-4)
