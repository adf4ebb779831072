"""The torch custom ops: registered once, traceable, and equal where two ops mean the same."""

from __future__ import annotations

import importlib

import pytest
import torch

from tapeout.plugins.case import Tolerance, cache_tolerance, cases
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.example import example, example_step
from tapeout.plugins.registry import OPS, TRACE_ONLY_OPS, op, register_torch_ops
from tapeout.plugins.torch_op import torch_signature


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    register_torch_ops()
    register_torch_ops()  # a second call must do nothing


@pytest.mark.parametrize("name", sorted(n for n in set(OPS) - TRACE_ONLY_OPS if not OPS[n].reads_cache))
def test_fake_kernel_agrees_with_the_real_one(name: str) -> None:
    target = getattr(torch.ops.tapeout, name)
    for case in cases(name):
        arguments = example(case.signature, 5)
        placed = OPS[name].place_weights(arguments.weights, case.signature.attrs)
        tensors = [*arguments.inputs, *placed]
        real = target(*tensors, **case.signature.attrs)
        with torch.device("meta"):
            fake = target(*(t if t is None else t.to("meta") for t in tensors), **case.signature.attrs)
        pairs = zip(real, fake, strict=True) if isinstance(real, (tuple, list)) else [(real, fake)]
        for a, b in pairs:
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), case.label


def test_ops_export_with_a_batch_dimension_and_dynamic_rows() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            ops = torch.ops.tapeout
            normed, total = ops.add_rms_norm(x, x, torch.ones(32), 1e-6, 0.0, True)
            table = ops.rope_table(positions, torch.ones(4), 1.0, "float32")
            q = ops.rope(normed.unflatten(-1, (4, 8)), table, False)
            attended = ops.attention(q, q, q, positions, None, None, 0, 0.3, 0, 0.0, False)
            hidden = ops.gated_activation(ops.linear(attended.flatten(-2), torch.ones(16, 32), None), "silu")
            return ops.select_rows(torch.cat([hidden, total], -1), rows)

    def arguments(t: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(1, t, 32), torch.arange(t)[None], torch.tensor([t - 1])

    dynamic = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC}, None)
    program = torch.export.export(Block(), arguments(6), dynamic_shapes=dynamic, strict=False)
    inputs = arguments(11)
    torch.testing.assert_close(program.module()(*inputs), Block()(*inputs))


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_equals_paged_attention_over_whole_prompts(sinks: bool) -> None:
    lengths = [5, 1, 9]
    step = example_step([(n, n) for n in lengths], kv_heads=2, head_dim=8, dtype="float32", tokens_per_page=4)
    q, k, v = torch.randn(1, 15, 4, 8), torch.randn(1, 15, 2, 8), torch.randn(1, 15, 2, 8)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    sink = torch.randn(4) if sinks else None
    packed = torch.ops.tapeout.attention(q, k, v, positions, None, sink, 0, 0.35, 3, 4.0, False)
    paged = torch.ops.tapeout.paged_attention(
        q,
        k,
        v,
        None,
        sink,
        step.kv_pool,
        step.page_table,
        step.cu_q[:4],
        step.kv_lens[:3],
        0,
        0.35,
        3,
        4.0,
        False,
    )
    torch.testing.assert_close(paged, packed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [0, 2])
def test_attention_agrees_with_torch(window: int) -> None:
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    mask = (distance >= 0) & (distance < (window or 6))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    actual = torch.ops.tapeout.attention(q, k, v, torch.arange(3, 9), None, None, 0, 0.4, window, 0.0, False)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_int8_reference_is_close_to_the_float_product() -> None:
    x, weight = torch.randn(7, 256), torch.randn(20, 256)
    scale = weight.abs().amax(1) / 127
    quantized = torch.round(weight / scale[:, None]).to(torch.int8)
    actual = torch.ops.tapeout.linear_int8(x, quantized, scale, None)
    error = (actual - x @ weight.t()).abs().max() / (x @ weight.t()).std()
    assert error < 0.05


def test_rope_rotates_as_hugging_face_does() -> None:
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    q = torch.randn(1, 5, 3, 16)
    table = torch.ops.tapeout.rope_table(torch.arange(5)[None], 0.3 ** torch.arange(8.0), 1.0, "float32")
    cos, sin = (torch.cat([half, half], -1) for half in table.chunk(2, -1))
    expected, _ = llama.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    assert torch.equal(torch.ops.tapeout.rope(q, table, False), expected.transpose(1, 2))


def test_rms_norm_styles_equal_hugging_face() -> None:
    x, weight = torch.randn(1, 5, 64).bfloat16(), torch.randn(64).bfloat16()
    llama = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRMSNorm(64, 1e-6)
    gemma = importlib.import_module("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(64, 1e-6)
    for module, offset, cast in ((llama, 0.0, True), (gemma, 1.0, False)):
        module.weight.data = weight
        assert torch.equal(torch.ops.tapeout.rms_norm(x, weight, 1e-6, offset, cast), module(x))


def test_unknown_op_names_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="unknown op 'rmsnorm'") as caught:
        op("rmsnorm")
    assert caught.value.hint == "did you mean 'rms_norm'?"


def test_torch_signature_follows_the_schema() -> None:
    assert torch_signature(op("linear")) == "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
    assert torch_signature(op("rms_norm")).endswith(
        "float eps, float weight_offset, bool cast_before_weight) -> Tensor"
    )


def test_weights_find_their_places() -> None:
    """Signatures leave absent weights out; which ones these are may depend on an attribute."""
    attention, linear = op("rope_attention"), op("linear")
    norms, none = {"qk_norm": True}, {"qk_norm": False}
    assert attention.place_weights(("q", "k", "s"), norms) == ("q", "k", "s")
    assert attention.place_weights(("q", "k"), norms) == ("q", "k", None)
    assert attention.place_weights(("s",), none) == (None, None, "s")
    assert attention.place_weights((), none) == (None, None, None)
    assert attention.place_weights((None, None, "s"), none) == (None, None, "s")
    assert linear.place_weights(("w",), {}) == ("w", None)


def test_only_ops_that_compute_what_they_cache_may_differ_there() -> None:
    assert {name for name in OPS if OPS[name].reads_cache} == {
        "paged_attention", "paged_latent_attention", "rope_attention",
    }  # fmt: skip
    assert cache_tolerance("paged_attention", "bfloat16") == Tolerance(0.0, 0.0)
    assert cache_tolerance("rope_attention", "float32").relative > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fast_look_never_finds_what_is_not(dtype: torch.dtype) -> None:
    """At the border of what is allowed the answer is that of exact arithmetic."""
    allowed = Tolerance(1e-4, 1e-4)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(20_000, generator=generator).to(dtype)
    factor = 1 + (torch.rand(20_000, generator=generator, dtype=torch.float64) - 0.5) * 1e-6
    got = (wanted.double() + (1e-4 + 1e-4 * wanted.double().abs()) * factor).to(dtype)
    exact = (
        (got.double() - wanted.double()).abs() - allowed.absolute - allowed.relative * wanted.double().abs()
    )
    held = [allowed.violation(got[i : i + 1], wanted[i : i + 1]) is None for i in range(2000)]
    assert held == (exact[:2000] <= 0).tolist()
    one_inf = torch.full((3,), 1.0, dtype=dtype)
    one_inf[1] = torch.inf
    assert allowed.violation(torch.ones(3, dtype=dtype), one_inf) is not None
    assert allowed.violation(one_inf, one_inf.clone()) is None


def test_tolerance_reports_the_worst_element_and_nan() -> None:
    allowed, wanted = Tolerance(0.1, 0.0), torch.tensor([[1.0, 2.0], [torch.nan, torch.inf]])
    assert allowed.violation(wanted.clone(), wanted) is None
    got = wanted.clone()
    got[0, 1] = 3.0
    message = allowed.violation(got, wanted)
    assert message is not None
    assert "1 of 4 elements differ; worst at [0, 1]" in message
    for spoiled in ((0, 0, torch.nan), (0, 0, torch.inf), (1, 0, 0.0), (1, 1, -torch.inf), (1, 1, 7.0)):
        got = wanted.clone()
        got[spoiled[0], spoiled[1]] = spoiled[2]
        assert allowed.violation(got, wanted) is not None
