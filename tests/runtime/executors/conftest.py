"""A small real model: two Llama-like layers as an engine, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapeout.compiler.engine_writer import write_engine
from tapeout.compiler.memory_plan import BufferRequest, plan_arena
from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.cpu import OpSignature, TensorType
from tapeout.plugins.native.host import detect_host
from tapeout.runtime.engine import (
    FORMAT_VERSION,
    Buffer,
    Engine,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    Program,
    Record,
    TacticRange,
    View,
    open_engine,
)
from tapeout.runtime.executors import load_executor
from tapeout.runtime.step import StepInputs

LIMITS = Limits(max_batch_size=3, max_num_tokens=12, max_seq_len=40, tokens_per_page=4)
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 29, 24, 4, 2, 8, 2
QKV = (HEADS + 2 * KV_HEADS) * DIM
EPS = 1e-5
TACTICS = {"linear": (("aten", 2), ("onednn", None))}


def make_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.5).astype(np.float32)

    weights = {"embed": normal(VOCAB, HIDDEN), "freq": np.array([1.0, 0.1, 0.01, 0.001], np.float32)}
    for i in range(LAYERS):
        weights |= {
            f"{i}.norm": 1 + normal(HIDDEN),
            f"{i}.qkv": normal(QKV, HIDDEN),
            f"{i}.o": normal(HIDDEN, HEADS * DIM),
        }
    return weights | {"norm": 1 + normal(HIDDEN), "head": normal(VOCAB, HIDDEN)}


class ProgramBuilder:
    """Collects records over named buffers, then plans the arena."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = weights
        self.shapes: dict[str, tuple[int | str, ...]] = {}
        self.records: list[Record] = []
        self.signatures: dict[str, OpSignature] = {}

    def buffer(self, name: str, *shape: int | str) -> View:
        self.shapes[name] = shape
        strides = [int(np.prod([int(d) for d in shape[i + 1 :]])) for i in range(len(shape))]
        return View(name, "float32", shape, tuple(strides))

    def emit(
        self, op: str, inputs: Sequence[View], weights: Sequence[str], outputs: Sequence[View], **attrs: Any
    ) -> None:
        def types(views: Sequence[View]) -> tuple[TensorType, ...]:
            return tuple(TensorType(v.dtype, v.shape) for v in views)

        weight_types = tuple(TensorType("float32", self.weights[w].shape) for w in weights if w)
        speed_attrs = {k: v for k, v in attrs.items() if k != "layer"}
        signature = OpSignature(op, types(inputs), weight_types, types(outputs), speed_attrs)
        self.signatures[signature.key()] = signature
        self.records.append(Record(op, tuple(inputs), tuple(weights), tuple(outputs), attrs, signature.key()))

    def finish(self, logits: View) -> Program:
        rows = {"T": LIMITS.max_num_tokens, "R": LIMITS.max_batch_size}
        spans: dict[str, list[int]] = {}
        for i, record in enumerate(self.records):
            for view in (*record.inputs, *record.outputs):
                spans.setdefault(view.buffer, []).append(i)
        spans[logits.buffer].append(len(self.records))
        size = {n: 4 * int(np.prod([rows.get(d, d) for d in s])) for n, s in self.shapes.items()}
        offsets, arena = plan_arena(
            [BufferRequest(n, size[n], min(spans[n]), max(spans[n])) for n in self.shapes]
        )
        buffers = tuple(Buffer(n, "float32", s, offsets[n], size[n]) for n, s in self.shapes.items())
        tactics = {}
        for key, signature in self.signatures.items():
            limit = rows[str(signature.outputs[0].shape[0])]
            tactics[key] = tuple(
                TacticRange(end or limit, name)
                for name, end in TACTICS.get(signature.op, (("aten", None),))
                if end is None or end < limit
            )
        return Program(arena, buffers, tuple(self.records), logits, self.signatures, tactics)


def make_program(weights: Mapping[str, np.ndarray]) -> Program:
    b = ProgramBuilder(weights)
    norm = {"eps": EPS, "weight_offset": 0.0, "cast_before_weight": True}
    ids, positions = View("token_ids", "int32", ("T",), (1,)), View("positions", "int32", ("T",), (1,))
    table = b.buffer("table", "T", DIM)
    b.emit("rope_table", [positions], ["freq"], [table], scaling=1.0, dtype="float32")
    x = b.buffer("x", "T", HIDDEN)
    b.emit("embedding", [ids], ["embed"], [x])
    for i in range(LAYERS):
        normed, qkv = b.buffer(f"{i}.normed", "T", HIDDEN), b.buffer(f"{i}.qkv", "T", QKV)
        b.emit("rms_norm", [x], [f"{i}.norm"], [normed], **norm)
        b.emit("linear", [normed], [f"{i}.qkv", ""], [qkv])
        q = View(f"{i}.qkv", "float32", ("T", HEADS, DIM), (QKV, DIM, 1), 0)
        k = View(f"{i}.qkv", "float32", ("T", KV_HEADS, DIM), (QKV, DIM, 1), HEADS * DIM)
        v = View(f"{i}.qkv", "float32", ("T", KV_HEADS, DIM), (QKV, DIM, 1), (HEADS + KV_HEADS) * DIM)
        qr, kr = b.buffer(f"{i}.q", "T", HEADS, DIM), b.buffer(f"{i}.k", "T", KV_HEADS, DIM)
        b.emit("rope", [q, table], [], [qr], interleaved=False)
        b.emit("rope", [k, table], [], [kr], interleaved=False)
        attended = b.buffer(f"{i}.attended", "T", HEADS, DIM)
        attention = {"scale": DIM**-0.5, "window": 0, "softcap": 0.0, "alibi": False}
        b.emit("paged_attention", [qr, kr, v], [""], [attended], layer=i, **attention)
        projected, total = b.buffer(f"{i}.o", "T", HIDDEN), b.buffer(f"{i}.sum", "T", HIDDEN)
        flat = View(f"{i}.attended", "float32", ("T", HEADS * DIM), (HEADS * DIM, 1))
        b.emit("linear", [flat], [f"{i}.o", ""], [projected])
        b.emit("add", [projected, x], [], [total])
        x = total
    rows, normed, logits = (
        b.buffer("rows", "R", HIDDEN),
        b.buffer("normed", "R", HIDDEN),
        b.buffer("logits", "R", VOCAB),
    )
    b.emit("select_rows", [x, View("row_ids", "int32", ("R",), (1,))], [], [rows])
    b.emit("rms_norm", [rows], ["norm"], [normed], **norm)
    b.emit("linear", [normed], ["head", ""], [logits])
    return b.finish(logits)


def reference_logits(weights: Mapping[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """[len(ids), VOCAB] of the whole sequence at once, without a cache."""
    w = {n: torch.from_numpy(a) for n, a in weights.items()}
    n = len(ids)
    angles = torch.arange(n)[:, None].float() * w["freq"]
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))

    def rotate(t: torch.Tensor) -> torch.Tensor:
        half = t.shape[-1] // 2
        return t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin

    def normalise(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + EPS) * weight

    x = w["embed"][list(ids)]
    for i in range(LAYERS):
        qkv = normalise(x, w[f"{i}.norm"]) @ w[f"{i}.qkv"].T
        q, k, v = (
            t.reshape(n, -1, DIM) for t in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
        )
        x = x + out.transpose(0, 1).reshape(n, -1) @ w[f"{i}.o"].T
    return (normalise(x, w["norm"]) @ w["head"].T).numpy()


def make_step(
    *sequences: tuple[int, Sequence[int], int, Sequence[int]], sample: Sequence[int] | None = None
) -> StepInputs:
    """Sequences (slot, new ids, tokens already cached, pages); `sample`: those whose last row is sampled."""
    lengths = [len(s[1]) for s in sequences]
    cu_q = np.concatenate([[0], np.cumsum(lengths)])
    sampled = range(len(sequences)) if sample is None else sample
    width = max(len(s[3]) for s in sequences)
    arrays: dict[str, Any] = {
        "token_ids": [i for s in sequences for i in s[1]],
        "positions": [s[2] + i for s in sequences for i in range(len(s[1]))],
        "cu_q": cu_q,
        "kv_lens": [s[2] + len(s[1]) for s in sequences],
        "page_table": [[*s[3], *[-1] * (width - len(s[3]))] for s in sequences],
        "slots": [s[0] for s in sequences],
        "row_ids": [cu_q[i + 1] - 1 for i in sampled],
        "row_slots": [sequences[i][0] for i in sampled],
    }
    return StepInputs(**{k: np.array(v, dtype=np.int32) for k, v in arrays.items()})


@pytest.fixture(scope="session")
def weights() -> dict[str, np.ndarray]:
    return make_weights()


@pytest.fixture(scope="session")
def program(weights: dict[str, np.ndarray]) -> Program:
    return make_program(weights)


@pytest.fixture(scope="session")
def reference(weights: dict[str, np.ndarray]) -> Callable[[Sequence[int]], np.ndarray]:
    return lambda ids: reference_logits(weights, ids)


@pytest.fixture(scope="session")
def greedy_ids() -> Callable[[Mapping[str, np.ndarray], Sequence[int], int], list[int]]:
    """`greedy_ids(weights, ids, count)`: what the model with these weights says next."""

    def say(weights: Mapping[str, np.ndarray], ids: Sequence[int], count: int) -> list[int]:
        tokens = list(ids)
        for _ in range(count):
            tokens.append(int(reference_logits(weights, tokens)[-1].argmax()))
        return tokens[len(ids) :]

    return say


@pytest.fixture(scope="session")
def step() -> Callable[..., StepInputs]:
    return make_step


@pytest.fixture
def write_model(tmp_path: Path, program: Program, weights: dict[str, np.ndarray]) -> Callable[..., Path]:
    """Writes the model as an engine; program, target, kernels and the weights' values may be replaced."""

    def write(
        name: str = "model.engine",
        *,
        program: Program = program,
        target: str | None = None,
        kernels: Mapping[str, bytes] | None = None,
        values: Mapping[str, np.ndarray] = weights,
        shared: bool = False,
        max_seq_len: int = LIMITS.max_seq_len,
    ) -> Path:
        limits = replace(LIMITS, max_seq_len=max_seq_len)
        source = "test" if values is weights else f"test {id(values)}"
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            target=target or f"cpu:{detect_host().level}",
            model=ModelFacts("LlamaForCausalLM", "llama", "float32", "none", VOCAB, 40, source),
            limits=limits,
            kv_cache=KvCacheLayout(LAYERS, KV_HEADS, DIM, "float32"),
            tokenizer=None,
            generation={},
            options={},
            versions={},
            passes={},
            parity={"verdict": "skipped"},
            timed=False,
        )
        refs = {n: WeightRef.of(TensorInfo(n, a.dtype.name, a.shape)) for n, a in values.items()}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_engine(
            tmp_path / name,
            manifest,
            program,
            refs,
            values.__getitem__,
            kernels or {},
            {},
            source_digest=source,
            shared=shared,
        )
        return tmp_path / name

    return write


@pytest.fixture
def engine(write_model: Callable[..., Path]) -> Iterator[Engine]:
    with open_engine(write_model()) as engine:
        yield engine


@pytest.fixture
def executor(engine: Engine) -> Iterator[Any]:
    executor = load_executor(engine, num_pages=10, threads=2)
    yield executor
    executor.close()
