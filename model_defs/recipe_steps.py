"""What the steps of a weight recipe do to an array (numpy and ml_dtypes, no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tapeout.plugins.errors import TapeoutError, UnsupportedError

_BLOCK_BYTES = 8 << 20  # row-wise steps hold about this much beside source and result


@dataclass(frozen=True)
class Step:
    """One step of a recipe.

    `concat` (all sources along dim `dim`), `stack` (all sources along a new dim `dim`), `transpose` (the
    last two dims), `slice` (dim, start, stop, and step where it is not 1), `reshape` (shape), `add`
    (value), `cast` (dtype), `quantize_rows` (symmetric int8 per output row; `part` is `values` or
    `scales`).
    """

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    def arg(self, key: str) -> Any:
        return dict(self.args)[key]


def np_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a dtype name; `bfloat16` and the float8 types come from ml_dtypes."""
    extra = getattr(ml_dtypes, name, None)
    try:
        return np.dtype(extra) if extra is not None else np.dtype(name)
    except TypeError:
        raise UnsupportedError(f"dtype {name!r} is not supported for a weight") from None


def mismatch(what: str, got: np.ndarray, dtype: str, shape: tuple[int, ...]) -> TapeoutError:
    """The error for an array that is not what its recipe says."""
    return TapeoutError(
        f"weight {what} is {got.dtype.name}{list(got.shape)}, expected {dtype}{list(shape)}",
        hint="the checkpoint does not match its config, or it changed during the build",
    )


def view(x: np.ndarray, step: Step) -> np.ndarray:
    """`transpose`, `slice` and `reshape`: no bytes move, but for a reshape of what is not contiguous."""
    if step.name == "transpose":
        return x.swapaxes(-1, -2)
    if step.name == "reshape":
        return x.reshape([int(s) for s in step.arg("shape").split("x")])
    window = slice(step.arg("start"), step.arg("stop"), dict(step.args).get("step"))
    return x[(slice(None),) * step.arg("dim") + (window,)]


def rowwise(x: np.ndarray, steps: Sequence[Step], what: str, out: np.ndarray | None) -> np.ndarray:
    """Casts and quantization in blocks of rows, so that no full-size intermediate exists.

    The result goes into `out` when given; `what` names the weight in errors.
    """
    if x.ndim == 0 or len(x) == 0:
        return _block(x, steps, what)
    rows = max(1, _BLOCK_BYTES // max(1, 4 * (x.size // len(x))))
    for start in range(0, len(x), rows):
        block = _block(x[start : start + rows], steps, what)
        if out is None:
            out = np.empty((len(x), *block.shape[1:]), block.dtype)
        elif out.shape != (len(x), *block.shape[1:]) or out.dtype != block.dtype:
            raise mismatch(what, block, out.dtype.name, out.shape)
        out[start : start + len(block)] = block
    assert out is not None
    return out


def _block(block: np.ndarray, steps: Sequence[Step], what: str) -> np.ndarray:
    for step in steps:
        block = ROWWISE[step.name](block, step, what)
    return block


def _add(block: np.ndarray, step: Step, what: str) -> np.ndarray:
    """A number added, in the weight's own dtype."""
    return (block + np.asarray(step.arg("value"), block.dtype)).astype(block.dtype)


def _cast(block: np.ndarray, step: Step, what: str) -> np.ndarray:
    """Round to nearest even; a value float16 cannot hold is an error, never an infinity."""
    dtype = str(step.arg("dtype"))
    with np.errstate(over="ignore", invalid="ignore"):
        result = block.astype(np_dtype(dtype))
    if dtype == "float16" and not np.isfinite(result).all():
        bad = block[~np.isfinite(result)].astype(np.float32)
        raise TapeoutError(
            f"weight {what}: {bad.size} values do not fit float16 (the first is {bad.flat[0]}, "
            "the largest float16 is 65504)",
            hint="build with --dtype bfloat16 or float32",
        )
    return result


def _quantize_rows(block: np.ndarray, step: Step, what: str) -> np.ndarray:
    x = block.astype(np.float32)
    absmax = np.max(np.abs(x), axis=-1, initial=0.0)
    if not np.isfinite(absmax).all():
        raise TapeoutError(
            f"weight {what}: rows with NaN or infinity cannot be quantized",
            hint="build with --quantize none, or repair the checkpoint",
        )
    # A subnormal scale would lose the row's precision or be zero; such rows count as zeros.
    scale = (absmax / np.float32(127)).astype(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    if step.arg("part") == "scales":
        return scale
    return np.clip(np.rint(x / scale[..., None]), -127, 127).astype(np.int8)


#: Steps that only change how an array is looked at.
VIEWS = ("transpose", "slice", "reshape")
#: Steps that treat every row alone and can run in blocks.
ROWWISE: Mapping[str, Callable[[np.ndarray, Step, str], np.ndarray]] = {
    "add": _add,
    "cast": _cast,
    "quantize_rows": _quantize_rows,
}
