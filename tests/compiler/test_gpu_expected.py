"""The few elements that a pack holds are those of the whole result, which torch computes here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_kernels import compile_nothing

from tapeout.compiler.tactics import gpu_expected, gpu_pack
from tapeout.compiler.tactics.gpu_cases import input_names, stored_values, weight_names
from tapeout.compiler.tactics.gpu_contests import contests
from tapeout.plugins.case import Sampling, cases
from tapeout.plugins.cpu import OpSignature, StepState, TensorType
from tapeout.plugins.cuda import CudaTarget
from tapeout.plugins.errors import UnsupportedError
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import cuda_tactics
from tapeout.plugins.tactic_check.hashed import integers, normals
from tapeout.runtime.engine.manifest import Limits
from tapeout.runtime.tactic_timer.pack import CHECKED_LAYER, Cache, Entry, Operand
from tapeout.runtime.tactic_timer.pack_file import PackFile
from tapeout.runtime.tactic_timer.steps import ONE_PAGE, num_pages, step_tensors, used_tokens

LIMITS = Limits(max_batch_size=8, max_num_tokens=128, max_seq_len=300, tokens_per_page=32)
TARGET = CudaTarget(90, 4, 232448, LIMITS.tokens_per_page)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pack, "compile_all", compile_nothing)


def packed(types: OpSignature, kind: str, rows: int) -> tuple[Entry, PackFile]:
    """The entry of a signature at a bucket."""
    found = contests({types.key(): types}, LIMITS, TARGET)
    wanted = [c for c in found if (c.kind, c.rows) == (kind, rows)]
    file = gpu_pack.make_pack([replace(c, contenders=()) for c in wanted], LIMITS, TARGET, "cuda:sm_90")
    (entry,) = file.pack.entries
    return entry, file


def whole(operand: Operand, entry: Entry, steps: Mapping[str, np.ndarray], stored: Any) -> torch.Tensor:
    """All of an operand."""
    content, rest = operand.content, [int(d) for d in operand.shape[1:]]
    symbols = {"T": entry.check.rows, "R": entry.check.logit_rows}
    leading = symbols.get(str(operand.shape[0])) or int(operand.shape[0])
    if content.kind == "step":
        return torch.from_numpy(steps[content.name][:leading])
    if content.kind == "stored":
        return torch.from_numpy(stored)
    lines, columns = (leading, int(np.prod(rest))) if rest else (1, leading)
    place = (content.seed, np.arange(lines), np.arange(columns))
    made = integers(*place, content.high) if content.kind == "integers" else normals(*place, content.factor)
    return torch.from_numpy(made).to(getattr(torch, operand.dtype)).reshape(leading, *rest)


def whole_step(entry: Entry, cache: Cache, steps: Mapping[str, np.ndarray]) -> StepState:
    """The entry's step over all of its pool."""
    check, tokens = entry.check, cache.tokens_per_page
    pages, batch = num_pages(check, tokens), len(check.sequences)
    lines = np.arange(pages * 2 * cache.kv_heads)
    values = normals(cache.seed, lines, np.arange(tokens * cache.head_dim), cache.factor)
    pool = torch.full(
        (pages, CHECKED_LAYER + 1, 2, cache.kv_heads, tokens, cache.head_dim),
        torch.nan,
        dtype=getattr(torch, cache.dtype),
    )
    pool[:, CHECKED_LAYER] = torch.from_numpy(values).reshape(pool[:, 0].shape).to(pool.dtype)
    for page, used in enumerate(used_tokens(check, tokens, steps["page_table"]).tolist()):
        pool[page, :, :, :, used:] = torch.nan
    real = {"cu_q": batch + 1, "kv_lens": batch, "positions": check.rows, "token_ids": check.rows}
    tensors = {name: torch.from_numpy(steps[name][:count]) for name, count in real.items()}
    return StepState(
        counts=torch.from_numpy(steps["counts"][:4]),
        page_table=torch.from_numpy(steps["page_table"]),
        row_ids=torch.from_numpy(steps["row_ids"][:batch]),
        kv_pool=pool,
        tokens_per_page=tokens,
        **tensors,
    )


def samples_and_whole(types: OpSignature, kind: str, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the pack holds and the same elements of the whole result, for every sample."""
    entry, file = packed(types, kind, rows)
    page = ONE_PAGE if entry.cache is None else entry.cache.tokens_per_page
    steps = step_tensors(entry.check, page, entry.rows)
    stored = {n: np.array(v, np.float32) for n, v in stored_values(types).items()}
    inputs, weights = (
        [
            whole(o, entry, steps, stored.get(name))
            for name, o in zip(names(types), operands, strict=True)
        ]
        for names, operands in ((input_names, entry.inputs), (weight_names, entry.weights))
    )  # fmt: skip
    step = None if entry.cache is None else whole_step(entry, entry.cache, steps)
    attrs = types.attrs if step is None else {**types.attrs, "layer": CHECKED_LAYER}
    results = bind_reference(types.op, inputs, weights, attrs, step)()
    found = []
    for s in entry.samples:
        count = len(s.rows) * len(s.columns)
        held = file.numbers[s.start : s.start + count].reshape(len(s.rows), len(s.columns))
        if s.output >= 0:
            full = results[s.output].float().reshape(len(results[s.output]), -1).numpy()
        else:  # rows are places of tokens
            assert step is not None
            full = step.kv_pool[:, CHECKED_LAYER].permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)
            full = full.float().numpy()
        found.append((held, full[list(s.rows)][:, list(s.columns)]))
    return found


def case_of(op: str, words: str, dtype: str) -> OpSignature:
    return next(c.signature for c in cases(op) if c.label.startswith(dtype) and words in c.label)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("add", "bfloat16", ""),
        ("gated_activation", "bfloat16", ""),
        ("rms_norm", "float32", ""),
        ("add_rms_norm", "bfloat16", ""),
        ("rope", "float32", ""),
        ("rope_table", "float32", ""),
        ("embedding", "bfloat16", ""),
        ("select_rows", "float32", ""),
        ("moe_router", "float32", ""),
        ("moe_experts", "float32", "gated silu"),
        ("moe_experts", "bfloat16", "wide"),
        ("moe_experts", "float32", "bias"),
        ("linear", "float32", "bias"),
        ("linear", "bfloat16", ""),
        ("linear_add", "float32", "96x64 bias"),
        ("linear_add", "bfloat16", "64x320"),
        ("norm_linear", "float32", "64x320"),  # gates and ups
        ("norm_linear", "bfloat16", "160x48"),
        ("rope_attention", "float32", "mixed, qk norm"),
        ("rope_attention", "bfloat16", "decode"),
        ("rope_attention", "float32", "sinks, window"),
        ("paged_attention", "float32", ""),
        ("paged_attention", "float32", "ALiBi"),
        ("paged_latent_attention", "float32", "mixed"),
        ("paged_latent_attention", "bfloat16", "20 heads"),
        ("mul_weight", "bfloat16", "by 64"),
        ("xielu", "float32", ""),
    ],
)
def test_samples_are_elements_of_the_whole_result(op: str, dtype: str, words: str) -> None:
    types = case_of(op, words, dtype)
    kinds = [("mixed", 8)]
    if "attention" in op:
        kinds.append(("mixed", 64))
        kinds += [("decode", 4)] if any(t.decode_only for t in cuda_tactics(op)) else []
    for kind, rows in kinds:
        for held, wanted in samples_and_whole(types, kind, rows):
            # A product over fewer columns may add up in another order.
            exact = 1e-5 if dtype == "float32" else 1e-2
            np.testing.assert_allclose(held, wanted, rtol=exact, atol=exact)
            assert np.isfinite(held).all()
            assert held.std() > 0.01


def test_of_experts_those_of_a_row_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as an operand's part of their experts is not too large, and at least one."""
    types = case_of("moe_experts", "gated silu", "float32")
    chosen, up = int(types.inputs[1].shape[1]), types.weights[0]
    a_row = chosen * int(up.shape[1]) * int(up.shape[2])
    for limit, rows in ((a_row, 1), (2 * a_row, 2), (100 * a_row, 4)):
        monkeypatch.setattr(gpu_expected, "_MAX_GATHERED_ELEMENTS", limit)
        entry, _ = packed(types, "mixed", 64)
        assert len(entry.samples[0].rows) == rows
    monkeypatch.setattr(gpu_expected, "_MAX_GATHERED_ELEMENTS", a_row // chosen - 1)
    with pytest.raises(UnsupportedError, match="of up, expected at most") as refused:
        packed(types, "mixed", 64)
    assert "one row alone takes that many" in refused.value.hint


def test_a_weight_is_never_made_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """128,256 x 4,096 elements of a head, of which 4 x 64 results are known."""
    made = []

    def counting(seed: int, rows: np.ndarray, columns: np.ndarray, scale: float) -> np.ndarray:
        made.append(len(rows) * len(columns))
        return normals(seed, rows, columns, scale)

    monkeypatch.setattr(gpu_expected, "normals", counting)

    def act(width: int) -> TensorType:
        return TensorType("bfloat16", ("R", width))

    head = OpSignature("linear", (act(4096),), (TensorType("bfloat16", (128256, 4096)),), (act(128256),))
    entry, file = packed(head, "mixed", 8)
    assert sum(made) == (4 + 64) * 4096
    assert len(file.numbers) == 4 * 64
    (sample,) = entry.samples
    assert (sample.rows[0], sample.rows[-1]) == (0, entry.check.logit_rows - 1)
    assert (sample.columns[0], sample.columns[-1]) == (0, 128255)


def test_an_op_that_needs_all_of_a_large_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_expected, "_MAX_WEIGHT_ELEMENTS", 1000)
    monkeypatch.setattr(gpu_expected, "sampling", lambda op: Sampling())
    with pytest.raises(UnsupportedError, match="takes 6,144 elements of weight, expected") as refused:
        packed(case_of("linear_add", "96x64", "float32"), "mixed", 8)
    assert "SAMPLING" in refused.value.hint
