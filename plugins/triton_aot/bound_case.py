"""Operands that check a CUDA tactic: windows of wider rows, poisoned outputs, padded buckets, stale arrays.

Used by Triton's interpreter on the CPU and by the check on a GPU (`device`). Needs torch, not Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tapeout.plugins.case import Case, cache_tolerance, tolerance
from tapeout.plugins.cpu import OpSignature, StepState, TensorType
from tapeout.plugins.cuda import MAX_KV_HEADS
from tapeout.plugins.example import concrete, example_step, torch_dtype
from tapeout.plugins.reference import bind_reference
from tapeout.plugins.registry import OPS
from tapeout.plugins.triton_aot.operands import Operands

GUARD, LAYERS = 16, 2
_LOGIT_CASE_ROWS = 70  # T of ops over logit rows
STALE = 1 << 30


def _poison(dtype: torch.dtype) -> float | int:
    """What an output holds that nobody wrote."""
    return torch.nan if dtype.is_floating_point else STALE


def guarded(columns: int) -> int:
    """Columns with guard columns behind, so that rows are multiples of 16 elements."""
    return (columns + GUARD + 15) // 16 * 16


def strided(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The same values as a window of wider rows, followed by NaN rows up to `rows`."""
    if tensor.dim() < 2:
        fill = STALE if not tensor.is_floating_point() else torch.nan
        return torch.cat(
            [tensor, torch.full((rows - len(tensor),), fill, dtype=tensor.dtype, device=tensor.device)]
        )
    shape = (rows, guarded(tensor.shape[1]), *tensor.shape[2:])
    wide = torch.full(shape, _poison(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
    wide[: len(tensor), : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


@dataclass
class Bound:
    """One case ready to run: operands at `bucket` padded rows, and what to compare with."""

    signature: OpSignature
    operands: Operands
    buffers: list[torch.Tensor]
    expected: tuple[torch.Tensor, ...]
    expected_pool: torch.Tensor | None
    rows: int
    bucket: int

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(_poison(buffer.dtype))
        self.operands.workspace.fill_(0xFF)

    def problem(self) -> tuple[str | None, float]:
        """What is wrong with the outputs (None: nothing), and the largest error."""
        largest = 0.0
        for i, (buffer, wanted) in enumerate(zip(self.buffers, self.expected, strict=True)):
            view = self.operands.outputs[i][: len(wanted)]
            difference = (view.double() - wanted.double()).abs()
            largest = max(largest, float(difference.max())) if difference.numel() else largest
            limit = tolerance(self.signature.op, str(view.dtype).removeprefix("torch."))
            if problem := limit.violation(view.cpu(), wanted.cpu()):
                return problem, largest
            outside = torch.ones(buffer.shape[:2], dtype=torch.bool, device=buffer.device)
            outside[1 : 1 + len(wanted), : view.shape[1]] = False
            guards = buffer[outside]
            untouched = guards.isnan() if guards.is_floating_point() else guards == _poison(guards.dtype)
            if not bool(untouched.all()):
                return f"output {i} was written outside its rows", largest
        if self.expected_pool is not None:
            pool = self.operands.step["kv_pool"]
            if not torch.allclose(pool, self.expected_pool, rtol=0, atol=0, equal_nan=True):
                limit = cache_tolerance(self.signature.op, str(pool.dtype).removeprefix("torch."))
                if problem := limit.violation(pool, self.expected_pool):
                    return f"the cache differs from the reference's: {problem}", largest
        return None, largest


def bind(
    case: Case, rows: int, workspace_bytes: int, bucket: int, device: str = "cpu", seed: int = 0
) -> Bound:
    """Random operands of a case, with the reference's results.

    Args:
        rows: rows of the op (T, or R where its output has logit rows); bucket: them padded.
    """
    signature = case.signature
    generator = torch.Generator(device).manual_seed(seed)
    leading = {
        "T": max(rows, _LOGIT_CASE_ROWS) if str(signature.outputs[0].shape[0]) == "R" else rows,
        "R": rows,
    }
    inputs = _made(signature, "inputs", leading, generator)
    weights = _made(signature, "weights", leading, generator)
    state = _state(case, device, seed)
    step = _step_tensors(state, case, leading["T"], rows, leading["T"] + bucket - rows, device)
    expected = bind_reference(signature.op, inputs, weights, signature.attrs, state)()
    buffers, outputs = [], []
    for kind in signature.outputs:
        shape = (bucket + 2, guarded(int(kind.shape[1])), *(int(d) for d in kind.shape[2:]))
        dtype = torch_dtype(kind.dtype)
        buffers.append(torch.full(shape, _poison(dtype), dtype=dtype, device=device))
        outputs.append(buffers[-1][1:-1, : int(kind.shape[1])])
    pool_after = None
    if state is not None:  # the reference wrote the cache; the tactic gets the one before
        pool_after = state.kv_pool
        fresh = _state(case, device, seed)
        assert fresh is not None
        step["kv_pool"] = fresh.kv_pool
    workspace = torch.zeros(max(16, workspace_bytes), dtype=torch.uint8, device=device)
    operands = Operands(
        tuple(strided(t, len(t) + bucket - rows) for t in inputs), weights, outputs, step, workspace,
        signature.attrs,
        {"layers": LAYERS, "max_pages": step["page_table"].shape[1]} if state is not None else {},
    )  # fmt: skip
    return Bound(signature, operands, buffers, expected, pool_after, rows, bucket)


def _made(
    signature: OpSignature, group: str, leading: dict[str, int], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Random inputs or weights, made where the generator is: an 8B model's head takes seconds on a CPU."""
    names = [n.rstrip("?") for n in getattr(OPS[signature.op], group)]
    limits = {"token_ids": signature.weights[0].shape[0] if signature.weights else 1, "row_ids": leading["T"]}
    made = []
    for name, kind in zip(names, getattr(signature, group), strict=False):
        shape, dtype = concrete(kind, leading["T"], leading["R"]), torch_dtype(kind.dtype)
        options = {"generator": generator, "device": generator.device}
        if name == "expert_ids":  # distinct ones in every row
            experts = int(signature.weights[0].shape[0])
            order = torch.rand((shape[0], experts), **options).argsort(1)
            made.append(order[:, : shape[1]].to(dtype))
            continue
        if not dtype.is_floating_point:
            made.append(torch.randint(0, int(limits.get(name, 5000)), shape, dtype=dtype, **options))
            continue
        values = torch.randn(shape, dtype=dtype, **options)
        if name == "inv_freq":
            values = 10000.0 ** (-torch.arange(shape[0], device=generator.device) / shape[0])
        elif name in OPS[signature.op].matrices:
            values /= shape[-1] ** 0.5
        made.append(values)
    return tuple(made)


def _state(case: Case, device: str, seed: int) -> StepState | None:
    if not case.sequences:
        return None
    k: TensorType = case.signature.inputs[1]
    kv_heads, head_dim = OPS[case.signature.op].cache_shape([t.shape for t in case.signature.inputs])
    state = example_step(
        case.sequences, kv_heads=kv_heads, head_dim=head_dim, dtype=k.dtype, layers=LAYERS,
        tokens_per_page=case.tokens_per_page, seed=seed,
    )  # fmt: skip
    moved = {
        n: getattr(state, n).to(device) for n in vars(state) if isinstance(getattr(state, n), torch.Tensor)
    }
    return replace(state, **moved)


def _step_tensors(
    state: StepState | None, case: Case, rows: int, logit_rows: int, bucket: int, device: str
) -> dict[str, torch.Tensor]:
    sequences: Sequence[tuple[int, int]] = case.sequences or ((rows, rows),)
    counts = [rows, len(sequences), max(q for q, _ in sequences), max(kv for _, kv in sequences), logit_rows]
    seqs = [b for b, (q, _) in enumerate(sequences) for _ in range(q)]
    step = {
        "counts": counts,
        "row_seqs": seqs + [STALE] * (bucket - rows),
        "arrivals": [0] * (len(sequences) * MAX_KV_HEADS),
    }
    tensors = {n: torch.tensor(v, dtype=torch.int32, device=device) for n, v in step.items()}
    if state is not None:
        names = ("positions", "cu_q", "kv_lens", "page_table")
        tensors |= {n: getattr(state, n).contiguous() for n in names}
    return tensors
