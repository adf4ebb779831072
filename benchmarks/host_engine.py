# ruff: noqa: N802 (methods have the names of the driver's functions)
"""A CUDA engine without kernels, and a driver under it that does nothing: what is left is the host's work.

`LLM` opens the engine like any other and its `CudaExecutor` does all it does on a GPU machine: it checks
every step, writes the metadata into a host buffer, picks a bucket, makes every driver call and reads ids
one step late. On the idle driver calls return at once, so neither copies nor the calls' own cost are
part of what is measured; on a GPU they are, and the graphs that are launched are empty.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "runtime" / "executors"))
from fake_cuda import FakeCuda  # noqa: E402  (a test's driver, made of host memory)

from tapeout.compiler.engine_writer import stage_engine  # noqa: E402
from tapeout.plugins.cuda import TURNS  # noqa: E402
from tapeout.runtime import LLM  # noqa: E402
from tapeout.runtime.engine import (  # noqa: E402
    FORMAT_VERSION,
    Buffer,
    KvCacheLayout,
    Limits,
    Manifest,
    ModelFacts,
    Program,
    TokenizerFacts,
    View,
)
from tapeout.runtime.engine.launches import LaunchTable, RangeLaunches  # noqa: E402
from tapeout.runtime.executors.cuda import driver, replay  # noqa: E402

VOCAB = 4096
EOS = 0
_STEPS = 64
_SUCCESS = (driver.cu.CUresult.CUDA_SUCCESS,)


def make_text() -> str:
    """Some English and some Python: this project's own."""
    paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("runtime/**/*.py")])
    return "\n".join(p.read_text() for p in paths)


def make_tokenizer(text: str) -> tokenizers.Tokenizer:
    """A byte-level BPE of the text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    return made


def write_host_engine(path: Path, limits: Limits, tokenizer: tokenizers.Tokenizer) -> None:
    """An engine of `limits` whose program is empty: logits that nothing writes."""
    vocab = tokenizer.get_vocab_size()
    buffer = Buffer("logits", "bfloat16", ("R", 16), 0, limits.max_batch_size * 32)
    logits = View("logits", "bfloat16", ("R", 16), (16, 1))
    program = Program(buffer.size_bytes, (buffer,), (), logits, {}, {})
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        target="cuda:h200",
        model=ModelFacts("None", "none", "bfloat16", "none", vocab, limits.max_seq_len, "none"),
        limits=limits,
        kv_cache=KvCacheLayout(layers=1, kv_heads=1, head_dim=1, dtype="bfloat16"),
        tokenizer=TokenizerFacts(vocab, None, (EOS,), None),
        generation={},
        options={},
        versions={},
        passes={},
        parity={"verdict": "skipped"},
        timed=False,
    )
    launches = LaunchTable(
        sm=90,
        kernels=(),
        ranges={},
        decode_ranges={},
        row_buckets=_buckets(limits.max_num_tokens),
        logit_buckets=_buckets(limits.max_batch_size),
        workspace_bytes=0,
        scratch_bytes=0,
        receive=(),
        sample=(RangeLaunches(limits.max_batch_size, "", 0, ()),),
        sample_full=(RangeLaunches(limits.max_batch_size, "", 0, ()),),
    )
    texts = {"tokenizer.json": tokenizer.to_str().encode()}
    with stage_engine(
        path, manifest, program, {}, {}.__getitem__, {}, texts, source_digest="none", launches=launches
    ) as staged:
        staged.commit(manifest)


def _buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest."""
    return (*(1 << i for i in range(largest.bit_length()) if 1 << i < largest), largest)


class IdleCuda(FakeCuda):
    """A driver that runs nothing: a graph launch leaves the next ids of a text in the outbox."""

    CUresult = driver.cu.CUresult  # found at once, as in the real module

    def __init__(self, text_ids: np.ndarray, batch: int) -> None:
        super().__init__(free=8 << 30)
        # Rows start at places of their own; the text of a row begins again after so many steps.
        starts = np.random.default_rng(1).integers(0, len(text_ids) - _STEPS, batch)
        ids = text_ids[starts[None, :] + np.arange(_STEPS)[:, None]]
        # What a step leaves in its outbox: ids, then flags that all are finite.
        self._results = np.concatenate([ids, np.ones_like(ids)], 1).astype(np.int32)
        self._addresses = [row.ctypes.data for row in self._results]
        self._size_bytes = self._results[0].nbytes
        self._next = 0
        self.outbox = 0  # its address, once there is an executor

    def cuMemcpyHtoDAsync(self, device: int, host: int, size_bytes: int, stream: int) -> tuple[Any, ...]:
        return _SUCCESS

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return _SUCCESS

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return _SUCCESS

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        box = self.outbox + self._next % TURNS * self._size_bytes
        ctypes.memmove(box, self._addresses[self._next % _STEPS], self._size_bytes)
        self._next += 1
        return _SUCCESS


@dataclass(frozen=True)
class HostEngine:
    """An engine file without kernels, and the ids that its steps "sample"."""

    path: Path
    max_batch_size: int
    text_ids: np.ndarray

    @contextmanager
    def on_idle_driver(self, **options: Any) -> Iterator[LLM]:
        """An `LLM` on a driver that does nothing; its answers are pieces of the text."""
        modules, real = (driver, replay), driver.cu
        idle = IdleCuda(self.text_ids, self.max_batch_size)
        for module in modules:
            module.cu = idle
        driver.open_device.cache_clear()
        try:
            with LLM(self.path, **options) as llm:
                idle.outbox = llm._executor._sampled.addresses()["outbox"]  # type: ignore[attr-defined]
                yield llm
        finally:
            for module in modules:
                module.cu = real
            driver.open_device.cache_clear()

    @contextmanager
    def on_gpu(self, **options: Any) -> Iterator[LLM]:
        """An `LLM` on a real driver; every step gives the ids that were put into its outbox."""
        with LLM(self.path, **options) as llm:
            results = np.ones((TURNS, 2, self.max_batch_size), np.int32)
            results[:, 0] = self.text_ids[: self.max_batch_size]
            outbox = llm._executor._sampled.addresses()["outbox"]  # type: ignore[attr-defined]
            ctypes.memmove(outbox, results.ctypes.data, results.nbytes)
            yield llm


@contextmanager
def host_engine(limits: Limits) -> Iterator[HostEngine]:
    """The engine in a temporary folder. Its tokenizer is made from this project's own text."""
    text = make_text()
    tokenizer = make_tokenizer(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.engine"
        write_host_engine(path, limits, tokenizer)
        yield HostEngine(path, limits.max_batch_size, np.array(tokenizer.encode(text).ids))
