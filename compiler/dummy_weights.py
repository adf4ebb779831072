"""Seeded random weights of an engine's real shapes: for measuring where no checkpoint is at hand.

Needs the engine file alone (built with `--weights shared`), neither torch nor a checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tapeout.compiler.ir import IR_TEXT, parse
from tapeout.compiler.pending_file import Progress
from tapeout.compiler.shared_weights import write_weights_file
from tapeout.compiler.weight_file import shared_path
from tapeout.model_defs.recipe_steps import np_dtype
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UsageError
from tapeout.runtime.engine.reader import open_engine

_BLOCK = 1 << 22  # random values drawn once; every tensor is the block repeated from a place of its own


def write_dummy_weights(engine_path: Path, seed: int, progress: Progress | None = None) -> Path:
    """Write the weight file that stands beside a shared engine, full of random values.

    The file says that it is a dummy; a runtime that opens it warns, and a real build replaces it.

    Raises:
        UsageError: the engine embeds its weights, or a weight file stands there already.
    """
    with open_engine(engine_path, verify=False, weights=False) as engine:
        path, digest = shared_path(engine), engine.manifest.weights["digest"]
        module = parse(engine.text(IR_TEXT).decode())
    if path.exists():
        raise UsageError(f"{path} exists already", hint="delete it first if it is a dummy")
    refs = {name: WeightRef.const(name, w.dtype, w.shape) for name, w in module.weights.items()}
    values = _Values(seed, refs)
    write_weights_file(path, {"digest": digest, "dummy": str(seed)}, refs, values.read, progress)
    return path


class _Values:
    """Random tensors by name: vectors near one (norms), matrices small enough to stay finite."""

    def __init__(self, seed: int, refs: dict[str, WeightRef]) -> None:
        self._refs = refs
        self._normal = np.random.default_rng(seed).standard_normal(_BLOCK, dtype=np.float32)

    def read(self, source: str) -> np.ndarray:
        ref = self._refs[source.removeprefix("const:")]
        count = math.prod(ref.shape)
        start = sum(source.encode()) * 7919 % _BLOCK
        values = np.roll(self._normal, start)
        if len(ref.shape) == 1:
            values = 1.0 + 0.1 * values
        elif ref.dtype == "int8":
            values = np.clip(values * 40, -127, 127).round()
        else:
            values = values * (0.5 / math.sqrt(ref.shape[-1]))
        return np.resize(values.astype(np_dtype(ref.dtype)), count).reshape(ref.shape)
