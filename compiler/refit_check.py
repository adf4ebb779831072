"""Is an engine with new weights sound? Its weights are looked at here, a step of it runs in a process of its
own: that may need torch, and what it does with bad weights must not end this one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tapeout.plugins.errors import CapacityError, EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine.reader import Engine, WeightData, open_engine

#: Of a float's bits without the sign: the type that holds them, the mask, and the first that is not finite.
_FLOAT_BITS = {
    "float64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "float8_e5m2": (np.uint8, 0x7F, 0x7C),
    "float8_e4m3fn": (np.uint8, 0x7F, 0x7F),
}
_PIECE_BYTES = 8 << 20
_THREADS = 2
_SECONDS = 600
_TOKENS = 8
_BOOT = "import sys; from tapeout.compiler.refit_check import main; main(sys.argv[1])"


@dataclass(frozen=True)
class Ran:
    """What became of a step: it gave sound logits, or this machine cannot run it, for a reason."""

    verified: bool
    text: str


def weight_problems(engine: Engine) -> list[str]:
    """A line for each weight that holds NaN or infinity, and for each matrix that is all zero.

    A vector may be all zero: biases often are.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(filter(None, pool.map(lambda name: _problem(engine.weight(name)), engine.weights)))


def _problem(weight: WeightData) -> str | None:
    largest = 0
    bad = 0
    kind, mask, limit = _FLOAT_BITS.get(weight.dtype, (np.uint8, 0xFF, None))
    for piece in _pieces(weight.data):
        bits = piece.view(kind) & kind(mask)
        largest = max(largest, int(bits.max()))
        if limit is not None and largest >= limit:
            bad += int((bits >= kind(limit)).sum())
    where = f"{weight.name} {weight.dtype}{list(weight.shape)}"
    if bad:
        return f"{where} has {bad:,} values that are NaN or infinite"
    return f"{where} is all zero" if largest == 0 and len(weight.shape) > 1 and weight.data.nbytes else None


def _pieces(data: memoryview) -> Iterator[np.ndarray]:
    whole = np.frombuffer(data, np.uint8)
    for at in range(0, len(whole), _PIECE_BYTES):
        yield whole[at : at + _PIECE_BYTES]


class FirstStep:
    """A process that will run a few tokens through an engine; it loads what it needs while weights are made.

    As a context manager: the process ends with the block, whatever happens.
    """

    def __init__(self, target: str) -> None:
        self._command = [sys.executable, "-c", _BOOT, target]

    def __enter__(self) -> FirstStep:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def run(self, path: Path, name: Path) -> Ran:
        """Run the engine at `path`, which messages call `name`.

        Raises TapeoutError when its logits are not sound, or the process ends in a way of its own.
        """
        try:
            stdout, stderr = self._process.communicate(json.dumps(str(path)), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise TapeoutError(f"the engine's first step took more than {_SECONDS} s") from None
        try:
            told = json.loads(stdout.splitlines()[-1])
        except (ValueError, IndexError):
            last = "\n".join(stderr.strip().splitlines()[-5:])
            raise TapeoutError(
                f"the process of the engine's first step ended with {self._process.returncode}:\n{last}"
            ) from None
        if "problem" in told:
            hint = "the checkpoint is damaged, or overflows in the engine's dtype"
            raise TapeoutError(told["problem"], hint=hint)
        return Ran(told["verified"], told["text"].replace(str(path), str(name)))


def main(target: str) -> None:
    """The process: reads an engine's path, as JSON, and prints a line of JSON, either {"problem"} or
    {"verified", "text"}."""
    if target.startswith("cpu:"):
        with contextlib.suppress(ImportError):  # whoever runs the step tells
            import tapeout.runtime.executors.cpu  # noqa: F401
    path = Path(json.loads(sys.stdin.read()))
    try:
        told = {"verified": True, "text": "finite and not zero"} | _step(path)
    except (EngineIncompatibleError, UsageError, CapacityError) as error:
        told = {"verified": False, "text": f"not verified here: {error.message.splitlines()[0]}"}
    sys.stdout.write(json.dumps(told) + "\n")


def _step(path: Path) -> dict[str, str]:
    """{"problem"} when the logits of a short prompt are not sound."""
    from tapeout.runtime.executors import load_executor
    from tapeout.runtime.kv_cache import pages_for
    from tapeout.runtime.step import StepInputs

    with open_engine(path, verify=False) as engine:
        limits, vocab = engine.manifest.limits, engine.manifest.model.vocab_size
        tokens = min(_TOKENS, limits.max_num_tokens, limits.max_seq_len)
        pages = pages_for(tokens, limits.tokens_per_page)
        executor = load_executor(engine, num_pages=pages)
        try:
            zero = np.zeros(1, np.int32)
            logits = executor.forward(
                StepInputs(
                    token_ids=np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32),
                    positions=np.arange(tokens, dtype=np.int32),
                    cu_q=np.array([0, tokens], np.int32),
                    kv_lens=np.array([tokens], np.int32),
                    page_table=np.arange(pages, dtype=np.int32)[None],
                    slots=zero,
                    row_ids=np.array([tokens - 1], np.int32),
                    row_slots=zero,
                )
            )
        finally:
            executor.close()
    bad = int((~np.isfinite(logits)).sum())
    if bad:
        return {"problem": f"the engine's logits are not finite: {bad} of {logits.size} are NaN or infinite"}
    return {} if logits.any() else {"problem": "the engine's logits are all zero"}
