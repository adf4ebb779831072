"""`tapeout refit`: the weights of another checkpoint of the same model in an engine that is there.

Plan, tactics, kernels and texts are the engine's. What is made anew are the weights, by the engine's own
recipes, with neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tapeout.compiler.engine_writer import StagedEngine, stage_engine
from tapeout.compiler.pending_file import Progress
from tapeout.compiler.recipe_book import (
    RECIPES_TEXT,
    RecipeBook,
    book_text,
    check_recipes,
    recipe_book,
    source_facts,
)
from tapeout.compiler.refit_check import FirstStep, Ran, weight_problems
from tapeout.compiler.shared_weights import SharedWeights
from tapeout.model_defs.check_checkpoint import MAX_LISTED
from tapeout.model_defs.checkpoint_form import open_form
from tapeout.model_defs.resolve import locate_model
from tapeout.model_defs.source import Checkpoint
from tapeout.model_defs.source_facts import SourceFacts, differing_config, differing_text, read_facts
from tapeout.plugins.errors import EngineIncompatibleError, TapeoutError, UsageError
from tapeout.runtime.engine.manifest import Manifest
from tapeout.runtime.engine.reader import Engine, open_engine

_WEIGHTS = re.compile(r"weights:[0-9a-f]{64}")


@dataclass(frozen=True)
class Refitted:
    """What a refit wrote.

    Attributes:
        files: the engine, then its weight file if it shares it.
        checkpoint, built_from: the manifest's facts of the new checkpoint, and of the one of the build.
        kept_text: what the checkpoint says about text in another way than the engine.
        ran: what became of the engine's first step.
        weights_reused: the weight file was there already, from another engine that shares it.
    """

    files: tuple[Path, ...]
    checkpoint: str
    built_from: str
    kept_text: tuple[str, ...]
    ran: Ran
    weights_reused: bool


def refit(
    engine_path: Path,
    model: str,
    output: Path,
    *,
    revision: str | None = None,
    keep_text: bool = False,
    progress: Progress | None = None,
) -> Refitted:
    """Write `output`: the engine with the weights of `model`.

    Peak memory: as `stage_engine`. Nothing appears under `output` unless the new engine is sound: every
    weight is finite, no matrix is all zero, and a step of it gives finite logits that are not all zero,
    where this machine can run it.

    Args:
        model: HF directory, hub id or GGUF file: of the form, config, tensor names, shapes and types of the
            checkpoint the engine was built from.
        keep_text: the engine's tokenizer, chat template, token ids and sampling defaults stay, although the
            checkpoint's differ.

    Raises:
        UsageError: another model (all keys and all tensors that differ are listed), or another text and
            not `keep_text`; the paths are wrong.
        EngineError: the engine is damaged, or of a build that kept too little of its checkpoint.
        TapeoutError: the new weights are not sound.
    """
    _check_output(engine_path, output)
    location = locate_model(model, revision=revision)
    with open_engine(engine_path, weights=False) as engine:
        book, built = recipe_book(engine), source_facts(engine)
        check_recipes(book, str(engine.manifest.weights["digest"]), engine_path)
        checkpoint, problems = open_form(location, book.form, book.tensors, book.unused)
        # What differs in the config is the reason for tensors that do not fit.
        different_text = _compare(engine_path, built, location, checkpoint, keep_text)
        if problems:
            raise _other_tensors(location, engine_path, problems)
        with (
            FirstStep(engine.manifest.target) as step,
            _staged(engine, book, checkpoint, output, progress) as (staged, manifest),
        ):
            try:
                _check_weights(staged.path, location)
                ran = step.run(staged.path, output)
            except BaseException:
                if not staged.result.shared_reused:
                    for path in staged.result.paths[1:]:
                        path.unlink(missing_ok=True)
                raise
            # Not the reason, if it could not run: that is about this machine.
            parity = {"verdict": "refit", "outputs": ran.text if ran.verified else "not verified"}
            result = staged.commit(replace(manifest, parity=parity))
        return Refitted(
            result.paths,
            manifest.model.checkpoint,
            _origin(engine.manifest),
            different_text,
            ran,
            result.shared_reused,
        )


@contextlib.contextmanager
def _staged(
    engine: Engine, book: RecipeBook, checkpoint: Checkpoint, output: Path, progress: Progress | None
) -> Iterator[tuple[StagedEngine, Manifest]]:
    """The new engine under a temporary name, and its manifest but for the verdict."""
    digest, hashes = checkpoint.digest(), checkpoint.hashes.result()
    new_book = replace(
        book,
        source_digest=digest,
        sha256={name: hashes[name] for name in book.sha256},
    )
    old = engine.manifest
    model = replace(old.model, checkpoint=_WEIGHTS.sub(f"weights:{digest}", old.model.checkpoint))
    manifest = replace(old, model=model, parity={"verdict": "pending"})
    texts = {name: engine.text(name) for name in engine.text_names} | {RECIPES_TEXT: book_text(new_book)}
    refs, read = new_book.refs(), new_book.reader(checkpoint)
    shared = old.weights.get("storage") == "shared"
    with stage_engine(
        output,
        manifest,
        engine.program,
        refs,
        read,
        {name: engine.kernel(name) for name in engine.kernel_names},
        texts,
        source_digest=digest,
        shared=SharedWeights(output, refs, read, lambda: digest) if shared else None,
        launches=engine.launches,
        segments={name: engine.segment(name) for name in engine.segment_names},
        progress=progress,
        weight_facts={"refit": {"built_from": _origin(old), "engine": engine.digest}},
    ) as staged:
        yield staged, manifest


def _origin(manifest: Manifest) -> str:
    """The checkpoint an engine was built from, however often it was refitted since."""
    refitted: Any = manifest.weights.get("refit")
    return str(refitted["built_from"]) if refitted else manifest.model.checkpoint


def _compare(
    engine_path: Path, built: SourceFacts, location: Path, checkpoint: Checkpoint, keep_text: bool
) -> tuple[str, ...]:
    """Refuse another config, and another text unless the engine's is to stay; what differs of that."""
    found = read_facts(location, checkpoint)
    if lines := differing_config(built, found):
        raise EngineIncompatibleError(
            f"{location} is another model than {engine_path} was built for:\n" + _listed(lines),
            hint="build an engine for it: tapeout build; a refit takes the same config alone",
        )
    text = tuple(differing_text(built, found))
    if text and not keep_text:
        raise UsageError(
            f"{location} speaks another text than {engine_path}:\n" + _listed(text),
            hint="--keep-text keeps the engine's; or build an engine with the checkpoint's: tapeout build",
        )
    return text


def _check_weights(path: Path, location: Path) -> None:
    with open_engine(path, verify=False) as engine:
        problems = weight_problems(engine)
    if problems:
        raise TapeoutError(
            f"the weights made from {location} are not sound:\n" + _listed(problems),
            hint="the checkpoint is damaged, or its values do not fit into the engine's dtype",
        )


def _check_output(engine_path: Path, output: Path) -> None:
    with contextlib.suppress(OSError):
        if output.exists() and output.samefile(engine_path):
            raise UsageError(f"output {output} is the engine that is read", hint="name another file: -o FILE")


def _other_tensors(location: Path, engine_path: Path, problems: Sequence[str]) -> UsageError:
    return UsageError(
        f"{location} does not have the tensors {engine_path} was built from: {len(problems)} do not fit:\n"
        + _listed(problems),
        hint="give a fine-tune of the same model in the same precision, or build an engine for this one",
    )


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n".join(f"  {line}" for line in [*lines[:MAX_LISTED], *more])
