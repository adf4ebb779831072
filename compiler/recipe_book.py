"""The weight recipes of an engine, and facts of the checkpoint it came from, as texts of the engine.

With the recipes a weight file can be made from the checkpoint where the engine is used (`tapeout weights`),
and other weights put into the engine (`tapeout refit`), without torch and without the model's code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.model_defs.checkpoint_form import GgufForm, HfForm, form_of
from tapeout.model_defs.recipe_steps import Step, np_dtype
from tapeout.model_defs.source import Checkpoint, ModelSource, TensorInfo
from tapeout.model_defs.source_facts import SourceFacts, facts_of
from tapeout.model_defs.weights import CONST_PREFIX, Read, WeightRef, recipe_digest
from tapeout.plugins.errors import EngineCorruptError, EngineError, EngineIncompatibleError
from tapeout.runtime.engine.codec import decode, encode
from tapeout.runtime.engine.reader import Engine

RECIPES_TEXT, FACTS_TEXT = "recipes.json", "source.json"  # names among an engine's texts


@dataclass(frozen=True)
class RecipeStep:
    """A step by name, with its arguments."""

    name: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A `WeightRef` as plain data; sources are checkpoint tensors, constants or recipes."""

    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str | Recipe, ...]
    steps: tuple[RecipeStep, ...]


@dataclass(frozen=True)
class Constant:
    """An array no checkpoint holds: C order, little endian, base64."""

    dtype: str
    shape: tuple[int, ...]
    data: str


@dataclass(frozen=True)
class RecipeBook:
    """Everything that decides an engine's weights, but for the checkpoint's bytes.

    Attributes:
        source_digest: the checkpoint's own digest at the build.
        hf, gguf: the form of the checkpoint; one of them is there.
        tensors: what the recipes read, by HF name, as the checkpoint's files have it.
        sha256: of the same tensors' bytes, to tell which of another checkpoint differ.
        unused: HF names of tensors the checkpoint held that no recipe reads.
        constants: by source name (`const:<name>`).
        weights: the engine's weights in file order.
    """

    source_digest: str
    hf: HfForm | None
    gguf: GgufForm | None
    tensors: Mapping[str, TensorInfo]
    sha256: Mapping[str, str]
    unused: tuple[str, ...]
    constants: Mapping[str, Constant]
    weights: Mapping[str, Recipe]

    @property
    def form(self) -> HfForm | GgufForm:
        form = self.hf or self.gguf
        assert form is not None  # `recipe_book` has seen to it
        return form

    def refs(self) -> dict[str, WeightRef]:
        """The recipes, ready to run."""
        return {name: _as_ref(recipe) for name, recipe in self.weights.items()}

    def reader(self, checkpoint: Checkpoint | None) -> Read:
        """Reads the sources of recipes: constants from here, everything else from `checkpoint`."""

        def read(name: str) -> np.ndarray:
            if name.startswith(CONST_PREFIX):
                constant = self.constants[name]
                raw = np.frombuffer(base64.b64decode(constant.data), np.uint8)
                return raw.view(np_dtype(constant.dtype)).reshape(constant.shape)
            assert checkpoint is not None, name
            return checkpoint.read(name)

        return read


def recipes_text(source: ModelSource, weights: Mapping[str, WeightRef], read: Read) -> bytes:
    """The text section for an engine whose weights are made by these recipes from this model."""
    names = dict.fromkeys(s for ref in weights.values() for s in ref.source_names())
    constants = [name for name in names if name.startswith(CONST_PREFIX)]
    stored, digests = source.checkpoint.stored, source.checkpoint.hashes.result()
    form = form_of(source)
    book = RecipeBook(
        source_digest=source.checkpoint.digest(),
        hf=form if isinstance(form, HfForm) else None,
        gguf=form if isinstance(form, GgufForm) else None,
        tensors={name: stored[name] for name in names if name not in constants},
        sha256={name: digests[name] for name in names if name not in constants},
        unused=tuple(sorted(stored.keys() - names.keys())),
        constants={name: _constant(read(name)) for name in constants},
        weights={name: _as_recipe(ref) for name, ref in weights.items()},
    )
    return book_text(book)


def book_text(book: RecipeBook) -> bytes:
    """Recipes as they stand in an engine."""
    return json.dumps(encode(book), separators=(",", ":"), ensure_ascii=False).encode()


def facts_text(source: ModelSource) -> bytes:
    """The text section that tells what else the checkpoint says."""
    return json.dumps(encode(facts_of(source)), separators=(",", ":"), ensure_ascii=False).encode()


def source_facts(engine: Engine) -> SourceFacts:
    """The facts an engine holds of its checkpoint; EngineError when it has none, from an older build."""
    return decode(SourceFacts, _text(engine, FACTS_TEXT), FACTS_TEXT)


def _text(engine: Engine, name: str) -> Any:
    if name not in engine.text_names:
        raise EngineError(
            f"{engine.path} holds no {name}", hint="build the engine again; builds of this version write it"
        )
    try:
        return json.loads(engine.text(name))
    except (ValueError, RecursionError) as error:
        raise EngineCorruptError(f"{engine.path}: {name} is not valid JSON: {error}") from None


def recipe_book(engine: Engine) -> RecipeBook:
    """The recipes an engine holds.

    Raises:
        EngineError: it holds none, from an older build, or what it holds cannot be read.
    """
    book = decode(RecipeBook, _text(engine, RECIPES_TEXT), RECIPES_TEXT)
    if (book.hf is None) == (book.gguf is None):
        raise EngineCorruptError(f"{engine.path}: {RECIPES_TEXT} names no form of checkpoint, or two")
    return book


def check_recipes(book: RecipeBook, digest: str, engine_path: Path) -> None:
    """Raise EngineIncompatibleError unless the recipes give here what they gave at the build, whose weights
    have this digest: steps of another version may make other bytes, which no kernel of the engine expects."""
    if recipe_digest(book.refs(), book.source_digest, book.reader(None)) != digest:
        raise EngineIncompatibleError(
            f"{engine_path}: its weight recipes are not those that made its weights",
            hint="another version of tapeout built it, whose recipes give other bytes: use that version, "
            "or build the engine again",
        )


def _constant(value: np.ndarray) -> Constant:
    data = base64.b64encode(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).decode()
    return Constant(value.dtype.name, value.shape, data)


def _as_recipe(ref: WeightRef) -> Recipe:
    sources = tuple(s if isinstance(s, str) else _as_recipe(s) for s in ref.sources)
    return Recipe(ref.dtype, ref.shape, sources, tuple(RecipeStep(s.name, dict(s.args)) for s in ref.steps))


def _as_ref(recipe: Recipe) -> WeightRef:
    sources = tuple(s if isinstance(s, str) else _as_ref(s) for s in recipe.sources)
    steps = tuple(Step(s.name, tuple(s.args.items())) for s in recipe.steps)
    return WeightRef(sources, steps, recipe.dtype, recipe.shape)
