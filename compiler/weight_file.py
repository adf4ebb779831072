"""The weight file of an engine with shared weights, made from the checkpoint where the engine is used.

Needs the engine file and the checkpoint, neither torch nor transformers. What is written is what
`tapeout build --weights shared` writes, byte for byte: the engine knows its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tapeout.compiler.files import check_output
from tapeout.compiler.pending_file import Progress
from tapeout.compiler.recipe_book import RecipeBook, check_recipes, recipe_book
from tapeout.compiler.shared_weights import existing_seal, write_weights_file
from tapeout.model_defs.check_checkpoint import MAX_LISTED
from tapeout.model_defs.checkpoint_form import open_form
from tapeout.model_defs.resolve import locate_model
from tapeout.model_defs.source import Checkpoint
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.runtime.engine.reader import Engine, open_engine


@dataclass(frozen=True)
class WeightFile:
    """The file beside the engine; `reused` when it was there already, whole."""

    path: Path
    reused: bool


def write_weights(
    engine_path: Path, model: str, *, revision: str | None = None, progress: Progress | None = None
) -> WeightFile:
    """Run the engine's recipes over `model` and write the weight file beside the engine.

    A file of that name that holds something else (random weights, say) is replaced, at the end and
    at once. Peak memory: twice the largest weight, or the one recipe that needs more than that.

    Args:
        model: the HF directory, hub id or GGUF file that the engine was built from, or a copy.

    Raises:
        UsageError: the engine embeds its weights; the model cannot be opened or is another one (all
            tensors that do not fit are listed).
        EngineError: the engine is damaged, holds no recipes, or its recipes are another version's.
    """
    with open_engine(engine_path, weights=False) as engine:
        path = shared_path(engine)
        digest, seal = str(engine.manifest.weights["digest"]), engine.shared_seal
        book = recipe_book(engine)
    refs = book.refs()
    check_recipes(book, digest, engine_path)
    location = locate_model(model, revision=revision)
    checkpoint, problems = open_form(location, book.form, book.tensors, book.unused)
    if problems:
        raise _does_not_fit(location, engine_path, problems)
    check_output(path, "weight file")
    if existing_seal(path, digest, refs) == seal:
        return WeightFile(path, reused=True)
    found = write_weights_file(path, {"digest": digest}, refs, book.reader(checkpoint), progress, seal=seal)
    if found != seal:
        raise _other_values(location, engine_path, book, checkpoint)
    return WeightFile(path, reused=False)


def shared_path(engine: Engine) -> Path:
    """Where the engine's weight file has to stand; UsageError when the engine has none."""
    if engine.shared_weights_path is None:
        raise UsageError(
            f"{engine.path} embeds its weights, there is no file to write",
            hint="build the engine with --weights shared",
        )
    return engine.shared_weights_path


def _other_values(
    location: Path, engine_path: Path, book: RecipeBook, checkpoint: Checkpoint
) -> TapeoutError:
    digests = checkpoint.hashes.result()
    differing = [f"differs: {book.tensors[n].name}" for n, sha in book.sha256.items() if digests[n] != sha]
    if differing:
        return _does_not_fit(location, engine_path, differing, "have other values")
    return TapeoutError(
        f"{location} is the checkpoint {engine_path} was built from, but its recipes gave other bytes here",
        hint="numpy, ml_dtypes or gguf convert differently from the versions of the build; install those",
    )


def _does_not_fit(
    location: Path, engine_path: Path, problems: Sequence[str], what: str = "do not fit"
) -> UsageError:
    more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    lines = "\n".join(f"  {line}" for line in [*problems[:MAX_LISTED], *more])
    return UsageError(
        f"{location} is not the checkpoint {engine_path} was built from: {len(problems)} tensors {what}:\n"
        + lines,
        hint="give the model, revision and precision of the build; another model needs an engine of its own",
    )
