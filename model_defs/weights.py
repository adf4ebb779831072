"""Weight references and recipes: how an engine tensor is made from checkpoint tensors.

The graph never holds bytes. A `WeightRef` names its sources and the steps that turn them
into the engine's tensor; passes edit recipes with the builders below, the writer runs one
at a time with numpy (no torch):

    q = WeightRef.of(info_q)                                  # float32 [960, 576]
    qkv = WeightRef.concat([q, k, v]).cast("bfloat16")        # each cast alone, straight into its rows
    values, scales = qkv.quantize_rows("values"), qkv.quantize_rows("scales")

Recipes nest: a source is a checkpoint tensor's name or another `WeightRef`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapeout.model_defs.recipe_steps import ROWWISE, VIEWS, Step, mismatch, np_dtype, rowwise, view
from tapeout.model_defs.source import TensorInfo
from tapeout.plugins.errors import UnsupportedError

#: Reads a checkpoint tensor (or `const:<name>`) into host memory.
Read = Callable[[str], np.ndarray]

CONST_PREFIX = "const:"
CAST_DTYPES = ("float32", "bfloat16", "float16")
#: Changes whenever the bytes a recipe produces change, so that shared weight files are told apart.
RECIPE_VERSION = 1


@dataclass(frozen=True)
class WeightRef:
    """A tensor of the engine: sources, steps, and the resulting dtype and shape.

    `sources` are checkpoint tensor names, `const:<name>` for constants the model's own
    code computed while tracing (inverse frequencies and the like), or refs of their own.
    With more than one source the first step is `concat` or `stack`.
    """

    sources: tuple[str | WeightRef, ...]
    steps: tuple[Step, ...]
    dtype: str
    shape: tuple[int, ...]
    meta: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @classmethod
    def of(cls, info: TensorInfo) -> WeightRef:
        """A checkpoint tensor as it is."""
        return cls((info.name,), (), info.dtype, info.shape)

    @classmethod
    def const(cls, name: str, dtype: str, shape: Sequence[int]) -> WeightRef:
        """A constant the tracing found; `read` is asked for `const:<name>`."""
        return cls((CONST_PREFIX + name,), (), dtype, tuple(shape))

    @classmethod
    def concat(cls, refs: Sequence[WeightRef], dim: int = 0) -> WeightRef:
        """Refs of one dtype joined along `dim`; each is produced straight into its slice."""
        if not refs:
            raise ValueError("concat needs at least one tensor")
        first = refs[0]
        if len(refs) == 1:
            return first
        dim = _dim(first, dim)
        if len({(r.dtype, r.shape[:dim], r.shape[dim + 1 :]) for r in refs}) > 1:
            lines = "\n".join(f"  {r.text()}: {r.dtype}{list(r.shape)}" for r in refs)
            raise UnsupportedError(f"tensors to join along dim {dim} differ in dtype or shape:\n{lines}")
        shape = list(first.shape)
        shape[dim] = sum(r.shape[dim] for r in refs)
        return cls(tuple(refs), (Step("concat", (("dim", dim),)),), first.dtype, tuple(shape))

    def cast(self, dtype: str) -> WeightRef:
        """Round to nearest even. A cast of a concat becomes a concat of casts (less memory)."""
        if dtype not in CAST_DTYPES or self.dtype not in (*CAST_DTYPES, "float64"):
            known = ", ".join(CAST_DTYPES)
            raise UnsupportedError(f"{self.text()}: cannot cast {self.dtype} to {dtype}; known: {known}")
        if dtype == self.dtype:
            return self
        if self._is_plain_concat():
            return self.concat([r.cast(dtype) for r in self._refs()], self.steps[0].arg("dim"))
        return self._then(Step("cast", (("dtype", dtype),)), dtype, self.shape)

    @classmethod
    def stack(cls, refs: Sequence[WeightRef], dim: int = 0) -> WeightRef:
        """Refs of one dtype and shape joined along a new dim; each is produced straight into its place."""
        first = refs[0]
        if {(r.dtype, r.shape) for r in refs} != {(first.dtype, first.shape)}:
            lines = "\n".join(f"  {r.text()}: {r.dtype}{list(r.shape)}" for r in refs)
            raise UnsupportedError(f"tensors to stack differ in dtype or shape:\n{lines}")
        shape = (*first.shape[:dim], len(refs), *first.shape[dim:])
        return cls(tuple(refs), (Step("stack", (("dim", dim),)),), first.dtype, shape)

    def transpose(self) -> WeightRef:
        """The last two dimensions swapped."""
        if len(self.shape) < 2:
            raise UnsupportedError(f"{self.text()}: transpose needs 2 dimensions, got {list(self.shape)}")
        shape = (*self.shape[:-2], *self.shape[:-3:-1])
        if self.steps and self.steps[-1].name == "transpose":
            return replace(self, steps=self.steps[:-1], shape=shape)
        return self._then(Step("transpose"), self.dtype, shape)

    def reshape(self, shape: Sequence[int]) -> WeightRef:
        """The same elements in another shape."""
        if math.prod(shape) != math.prod(self.shape):
            raise UnsupportedError(f"{self.text()}: {list(self.shape)} does not fit {list(shape)}")
        return self._then(Step("reshape", (("shape", "x".join(map(str, shape))),)), self.dtype, tuple(shape))

    def add(self, value: float) -> WeightRef:
        """A number added to every element."""
        return self._then(Step("add", (("value", value),)), self.dtype, self.shape)

    def every(self, dim: int, start: int, step: int) -> WeightRef:
        """Every `step`-th element of `dim`, from `start` on."""
        dim = _dim(self, dim)
        stop = self.shape[dim]
        shape = (*self.shape[:dim], len(range(start, stop, step)), *self.shape[dim + 1 :])
        args = (("dim", dim), ("start", start), ("stop", stop), ("step", step))
        return self._then(Step("slice", args), self.dtype, shape)

    def slice(self, dim: int, start: int, stop: int) -> WeightRef:
        """Elements `[start, stop)` of `dim` (a rank's part, or one tensor out of a fused one)."""
        dim = _dim(self, dim)
        if not 0 <= start < stop <= self.shape[dim]:
            raise UnsupportedError(
                f"{self.text()}: slice [{start}, {stop}) does not fit dim {dim} of {list(self.shape)}"
            )
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return self._then(Step("slice", (("dim", dim), ("start", start), ("stop", stop))), self.dtype, shape)

    def quantize_rows(self, part: str) -> WeightRef:
        """Symmetric int8 over the last dim. `part` `values`: int8 of this shape; `scales`: float32
        of `shape[:-1]`, scale = absmax / 127 (1.0 for rows of zeros); values round half to even."""
        if part not in ("values", "scales"):
            raise ValueError(f"part is {part!r}, expected 'values' or 'scales'")
        if len(self.shape) < 2 or self.dtype not in CAST_DTYPES:
            raise UnsupportedError(
                f"{self.text()}: quantize_rows needs a float tensor of 2 or more dimensions, "
                f"got {self.dtype}{list(self.shape)}"
            )
        if self._is_plain_concat() and self.steps[0].arg("dim") == 0:
            return self.concat([r.quantize_rows(part) for r in self._refs()], 0)
        step = Step("quantize_rows", (("part", part),))
        return (
            self._then(step, "int8", self.shape)
            if part == "values"
            else self._then(step, "float32", self.shape[:-1])
        )

    def source_names(self) -> Iterator[str]:
        """Every checkpoint tensor and `const:` the recipe reads, in order."""
        for source in self.sources:
            if isinstance(source, str):
                yield source
            else:
                yield from source.source_names()

    def text(self) -> str:
        """Stable one-line form: `cast(concat(a, b; dim=0); dtype=bfloat16)`."""
        text = ", ".join(s if isinstance(s, str) else s.text() for s in self.sources)
        for step in self.steps:
            args = ", ".join(f"{k}={v}" for k, v in step.args)
            text = f"{step.name}({text}; {args})" if args else f"{step.name}({text})"
        return text

    def _then(self, step: Step, dtype: str, shape: tuple[int, ...]) -> WeightRef:
        return replace(self, steps=(*self.steps, step), dtype=dtype, shape=shape)

    def _is_plain_concat(self) -> bool:
        """A concat of refs and nothing more (names alone do not tell dtype and shape)."""
        return [s.name for s in self.steps] == ["concat"] and len(self._refs()) == len(self.sources)

    def _refs(self) -> list[WeightRef]:
        return [s for s in self.sources if isinstance(s, WeightRef)]


def _dim(ref: WeightRef, dim: int) -> int:
    if not -len(ref.shape) <= dim < len(ref.shape):
        raise UnsupportedError(f"{ref.text()}: dim {dim} does not exist in shape {list(ref.shape)}")
    return dim % len(ref.shape)


def recipe_digest(weights: Mapping[str, WeightRef], source_digest: str, read: Read) -> str:
    """SHA-256 (hex) of everything that decides the weights' bytes, known before any is made.

    Covers names, order, recipes, dtypes, shapes, the checkpoint's own digest and the bytes of
    constants, which no checkpoint holds (only `const:` sources are read).
    """
    rows = [[name, ref.dtype, list(ref.shape), _as_lists(ref)] for name, ref in weights.items()]
    digest = hashlib.sha256(json.dumps([RECIPE_VERSION, source_digest, rows]).encode())
    names = {s for ref in weights.values() for s in ref.source_names() if s.startswith(CONST_PREFIX)}
    for name in sorted(names):
        value = np.ascontiguousarray(read(name))
        digest.update(f"\0{name}\0{value.dtype.name}\0{value.shape}\0".encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _as_lists(ref: WeightRef) -> list[Any]:
    """The recipe as nested lists: unambiguous whatever characters names hold."""
    sources = [s if isinstance(s, str) else [s.dtype, list(s.shape), _as_lists(s)] for s in ref.sources]
    return [sources, [[s.name, [list(a) for a in s.args]] for s in ref.steps]]


def run_recipe(ref: WeightRef, read: Read) -> np.ndarray:
    """Execute a recipe: a C-contiguous array of `ref.dtype` and `ref.shape`.

    Host memory: the result plus the largest single source (plus one block of rows).
    Raises TapeoutError when a source is not what the recipe expects, or when a value does
    not fit float16; the message names the tensor.
    """
    out = _execute(ref, read, None)
    if out.shape != ref.shape or out.dtype != np_dtype(ref.dtype):
        raise mismatch(ref.text(), out, ref.dtype, ref.shape)
    return out if out.flags.c_contiguous else np.ascontiguousarray(out)


def _execute(ref: WeightRef, read: Read, out: np.ndarray | None) -> np.ndarray:
    """Run `ref`; when `out` is given the result is written into it and `out` is returned."""
    steps = ref.steps
    if steps and steps[0].name == "concat":
        x = _concat(ref, read, out if len(steps) == 1 else None)
        steps = steps[1:]
    elif steps and steps[0].name == "stack":
        x = _stack(ref, read, out if len(steps) == 1 else None)
        steps = steps[1:]
    elif len(ref.sources) != 1:
        raise ValueError(f"{ref.text()}: several sources need a leading concat or stack step")
    else:
        x = _source(ref.sources[0], read)
        if not steps and (x.shape != ref.shape or x.dtype != np_dtype(ref.dtype)):
            raise mismatch(ref.text(), x, ref.dtype, ref.shape)
    while steps:
        if steps[0].name in VIEWS:
            x, steps = view(x, steps[0]), steps[1:]
            continue
        count = next((i for i, s in enumerate(steps) if s.name not in ROWWISE), len(steps))
        if count == 0:
            raise ValueError(f"{ref.text()}: unknown or misplaced step {steps[0].name!r}")
        x = rowwise(x, steps[:count], ref.text(), out if count == len(steps) else None)
        steps = steps[count:]
    if out is None or x is out:
        return x
    if x.shape != out.shape or x.dtype != out.dtype:
        raise mismatch(ref.text(), x, out.dtype.name, out.shape)
    np.copyto(out, x)
    return out


def _source(source: str | WeightRef, read: Read) -> np.ndarray:
    return read(source) if isinstance(source, str) else _execute(source, read, None)


def _stack(ref: WeightRef, read: Read, out: np.ndarray | None) -> np.ndarray:
    dim, refs = int(ref.steps[0].arg("dim")), ref._refs()
    if out is None:
        shape = (*refs[0].shape[:dim], len(refs), *refs[0].shape[dim:])
        out = np.empty(shape, np_dtype(refs[0].dtype))
    for index, source in enumerate(refs):
        _execute(source, read, out[(slice(None),) * dim + (index,)])
    return out


def _concat(ref: WeightRef, read: Read, out: np.ndarray | None) -> np.ndarray:
    dim = int(ref.steps[0].arg("dim"))
    refs = ref._refs()
    if len(refs) < len(ref.sources):  # a bare name does not tell its size: the parts are held together
        joined = np.concatenate([_source(s, read) for s in ref.sources], axis=dim)
        if out is None:
            return joined
        if joined.shape != out.shape or joined.dtype != out.dtype:
            raise mismatch(ref.text(), joined, out.dtype.name, out.shape)
        np.copyto(out, joined)
        return out
    if out is None:
        shape = list(refs[0].shape)
        shape[dim] = sum(r.shape[dim] for r in refs)
        out = np.empty(shape, np_dtype(refs[0].dtype))
    at = 0
    for source in refs:
        stop = at + source.shape[dim]
        _execute(source, read, out[(slice(None),) * dim + (slice(at, stop),)])
        at = stop
    return out
