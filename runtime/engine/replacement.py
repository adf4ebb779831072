"""Other weights for a program that is loaded: which file may take the place of which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from tapeout.plugins.errors import EngineIncompatibleError
from tapeout.runtime.engine.container import KIND_ENGINE, KIND_WEIGHTS
from tapeout.runtime.engine.mapped_file import MappedFile
from tapeout.runtime.engine.reader import Engine, open_engine, open_weights_file

_TOKENIZER = "tokenizer.json"


def open_replacement(engine: Engine, path: str | Path) -> Engine:
    """Open an engine whose weights can take the place of those of `engine`; everything in it is checked.

    `path` is an engine file with the same program, kernels, limits and tokenizer, or a shared weight file of
    the same layout, which is opened together with the file of `engine`. Kernels and captured graphs stay as
    they are, so every difference that they could notice is refused.

    Raises:
        UsageError, EngineError: it cannot be opened, or is damaged.
        EngineIncompatibleError: naming everything that differs.
    """
    path = Path(path)
    other = _with_weights(engine, path) if _is_weight_file(path) else open_engine(path, verify=False)
    try:
        if differing := [*_differences(engine, other)]:
            raise EngineIncompatibleError(
                f"the weights of {path} cannot take the place of those of {engine.path}:\n"
                + "\n".join(f"  {line}" for line in differing),
                hint="build it from the new checkpoint with the same options and timing cache, or load it as "
                "an engine of its own",
            )
        other.verify()
    except BaseException:
        other.close()
        raise
    return other


def _is_weight_file(path: Path) -> bool:
    """Whether its header says so; whatever else it is, `open_engine` tells."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            metadata = json.loads(file.read(min(length, 1 << 28)))["__metadata__"]
            return bool(metadata["kind"] == KIND_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _with_weights(engine: Engine, path: Path) -> Engine:
    """The same engine, opened once more, over another weight file."""
    with ExitStack() as stack:
        weights = stack.enter_context(closing(open_weights_file(path)))
        file = stack.enter_context(closing(MappedFile(engine.path, KIND_ENGINE)))
        other = Engine(file, weights, engine.manifest, engine.program, engine.launches)
        if other.digest != engine.digest:
            raise EngineIncompatibleError(
                f"{engine.path} is not the file any more that was loaded from there",
                hint="give the engine file whose weights are wanted",
            )
        stack.pop_all()
        return other


def _differences(engine: Engine, other: Engine) -> Iterator[str]:
    mine, its = engine.manifest, other.manifest
    for what, one, another in (
        ("target", mine.target, its.target),
        ("limits", mine.limits, its.limits),
        ("KV cache", mine.kv_cache, its.kv_cache),
        # Which checkpoint it came from is what may differ.
        ("model", replace(mine.model, checkpoint=""), replace(its.model, checkpoint="")),
        ("tokenizer", mine.tokenizer, its.tokenizer),
    ):
        if one != another:
            yield f"{what}: {another}, expected {one}"
    texts = [e.text(_TOKENIZER) if _TOKENIZER in e.text_names else None for e in (engine, other)]
    if texts[0] != texts[1]:
        yield f"{_TOKENIZER}: another one"
    if engine.program != other.program or engine.launches != other.launches:
        yield "program: other operations, tactics or places in memory"
    names = sorted({*engine.kernel_names, *other.kernel_names})
    kernels = [{n: e.kernel(n) for n in e.kernel_names} for e in (engine, other)]
    if changed := [n for n in names if kernels[0].get(n) != kernels[1].get(n)]:
        yield f"kernels: {', '.join(changed)}"
    layouts = [
        {name: (w.dtype, w.shape, w.begin - e.weights_begin) for name, w in e.weights.items()}
        for e in (engine, other)
    ]
    names = sorted({*layouts[0], *layouts[1]})
    if changed := [n for n in names if layouts[0].get(n) != layouts[1].get(n)]:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        yield f"weights of another type, shape or place: {', '.join(changed[:5])}{more}"
