"""What a matrix file asks for: models x targets x options, as a list of engines.

    defaults:                          # options of every engine, by the names of `tapeout build`'s flags
      dtype: bfloat16
    models:                            # name -> what MODEL is, alone or with options of this model
      smollm2: HuggingFaceTB/SmolLM2-135M-Instruct
      llama: {model: ./llama, max-seq-len: 8192}
    targets:                           # target -> options of this target; or a list of targets
      cpu: {dtype: float32}
      cuda:h200:
    exclude:                           # pairs that are left out; a key that is missing means any
      - {model: llama, target: cpu}
    include:                           # options of one pair, or a further engine where it has a name
      - {model: smollm2, target: cpu, name: cpu-int8, quantize: int8-dynamic}

An option of a pair stands over one of the model, that over one of the target, that over a default. What the
keys mean for users is told in docs/matrix.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeout.compiler.options import FIELDS, BuildOptions
from tapeout.compiler.options_file import printable, take_option
from tapeout.compiler.yaml_file import Entry, Node, read_yaml
from tapeout.plugins.errors import TapeoutError, UsageError
from tapeout.plugins.sample.params import shown
from tapeout.runtime.engine_set.index_check import ENGINE_SUFFIX, FILE_NAME, MODEL_NAME

#: Folders beside those of the models.
PACKS, TIMINGS = "packs", "timings"
_KEYS = ("defaults", "models", "targets", "include", "exclude")
#: Options that a matrix decides by itself, and what to do instead of giving them.
_DECIDED = {
    "target": "targets are the keys of `targets`",
    "pack": "`--stage compile` writes packs",
    "dump": "`tapeout build MODEL --dump DIR` writes the graphs of one engine",
    "keep_onnx": "`tapeout build MODEL --keep-onnx DIR` writes the regions of one engine",
    "dry_run": "`tapeout build --matrix FILE --dry-run` shows what would be built",
}
#: Options that say what the model is.
_OF_MODELS = frozenset({"revision", "trust_remote_code"})


@dataclass(frozen=True)
class EngineSpec:
    """One engine that a matrix asks for.

    Attributes:
        model: its name in the matrix, and the folder of its engines.
        name: of the engine: its file without the suffix, unique in the folder.
        source: the MODEL argument: a directory, a GGUF file or a hub id.
        options: all of it, the target included.
    """

    model: str
    name: str
    source: str
    options: BuildOptions

    @property
    def title(self) -> str:
        """How messages and selections call it: `smollm2/h200`."""
        return f"{self.model}/{self.name}"

    @property
    def file(self) -> str:
        return self.name + ENGINE_SUFFIX


def load_matrix(path: Path, flags: Mapping[str, Any]) -> tuple[EngineSpec, ...]:
    """The engines that a file asks for, models in the file's order, targets in theirs.

    Args:
        flags: options that were given as flags: they stand over all that the file says.

    Raises:
        UsageError: the file cannot be read, or holds unknown keys, values of a wrong type, options that
            contradict each other or their target, or no engine; everything that is wrong is listed.
    """
    root = read_yaml(path, "--matrix")
    if root is None or root.kind != "mapping":
        holds = "nothing" if root is None else f"a {root.type_name}"
        raise UsageError(
            f"--matrix: {str(path)!r} holds {holds}, expected the keys {', '.join(_KEYS)}",
            hint="docs/matrix.md describes the file",
        )
    return _Reader(path, flags).engines(root)


class _Reader:
    """Reads one file; collects what is wrong with it."""

    def __init__(self, path: Path, flags: Mapping[str, Any]) -> None:
        self._path, self._flags = path, flags
        self._problems: list[str] = []

    def engines(self, root: Node) -> tuple[EngineSpec, ...]:
        parts = self._parts(root)
        defaults = self._options(parts["defaults"], ()) if "defaults" in parts else {}
        models = self._models(parts.get("models"))
        targets = self._targets(parts.get("targets"))
        pairs = {
            (model, target): {**defaults, **targets[target], **own}
            for model, (_, own) in models.items()
            for target in targets
        }
        self._exclude(parts.get("exclude"), models, targets, pairs)
        named = {(model, engine_name(target)): (target, given) for (model, target), given in pairs.items()}
        self._include(parts.get("include"), models, lambda t: {**defaults, **targets.get(t, {})}, named)
        self._raise_problems()
        found = []
        for (model, name), (target, given) in named.items():
            spec = self._spec(model, name, models[model][0], {**given, **self._flags, "target": target})
            found += [spec] if spec is not None else []
        if not named:
            self._problems.append(f"{self._path}: asks for no engine, expected at least one model and target")
        self._raise_problems()
        order = {model: place for place, model in enumerate(models)}
        return tuple(sorted(found, key=lambda spec: order[spec.model]))

    def _raise_problems(self) -> None:
        if self._problems:
            raise UsageError("\n".join(self._problems), hint="docs/matrix.md describes the file")

    def _where(self, line: int, key: str = "") -> str:
        return f"{self._path}:{line}" + (f": {printable(key)}" if key else "")

    def _parts(self, root: Node) -> dict[str, Node]:
        """The top-level keys."""
        parts: dict[str, Node] = {}
        for entry in root.entries:
            where = self._where(entry.line, entry.key)
            if entry.key not in _KEYS:
                self._problems.append(f"{where}: unknown key{_nearest(entry.key, _KEYS)}")
            elif entry.key in parts:
                self._problems.append(f"{where}: given twice")
            else:
                parts[entry.key] = entry.value
        for key in ("models", "targets"):
            if key not in parts and "include" not in parts:
                self._problems.append(f"{self._path}: no {key!r}, expected at least one of the {key}")
        return parts

    def _options(self, node: Node, keys: Iterable[str], of_model: bool = False) -> dict[str, Any]:
        """The options in a mapping, which may also have `keys` (read by others)."""
        if node.value is None:
            return {}
        if node.kind != "mapping":
            self._problems.append(
                f"{self._where(node.line)}: {shown(node.value)} is of type {node.type_name}, expected "
                "options by the names of `tapeout build`'s flags"
            )
            return {}
        values: dict[str, Any] = {}
        for entry in node.entries:
            if entry.key in keys:
                continue
            where, name = self._where(entry.line, entry.key), entry.key.replace("-", "_")
            if name in _DECIDED and name in FIELDS:
                self._problems.append(f"{where}: not in a matrix: {_DECIDED[name]}")
            elif name in _OF_MODELS and not of_model:
                self._problems.append(f"{where}: belongs to a model, give it below `models`")
            elif not take_option(entry, where, values, self._problems):
                known = [*keys, *(f for f in FIELDS if f not in _DECIDED)]
                self._problems.append(f"{where}: unknown key{_nearest(entry.key, known)}")
        return values

    def _named(self, node: Node | None, what: str, expected: str = "a mapping") -> list[Entry]:
        """The entries of a mapping from names; each name once."""
        if node is None or node.value is None:
            return []
        if node.kind != "mapping":
            self._problems.append(
                f"{self._where(node.line)}: {what} are of type {node.type_name}, expected {expected}"
            )
            return []
        found: dict[str, Entry] = {}
        for entry in node.entries:
            if entry.key in found:
                self._problems.append(f"{self._where(entry.line, entry.key)}: given twice")
            found.setdefault(entry.key, entry)
        return list(found.values())

    def _models(self, node: Node | None) -> dict[str, tuple[str, dict[str, Any]]]:
        models: dict[str, tuple[str, dict[str, Any]]] = {}
        folded: dict[str, str] = {}
        for entry in self._named(node, "models"):
            where = self._where(entry.line, entry.key)
            if not MODEL_NAME.fullmatch(entry.key):
                self._problems.append(
                    f"{where}: is no name of a folder, expected letters, digits and . _ + -, none of . + - "
                    "in front"
                )
            if entry.key.lower() in {PACKS, TIMINGS}:
                self._problems.append(f"{where}: is the folder of {entry.key.lower()}, expected another name")
            if (other := folded.setdefault(entry.key.lower(), entry.key)) != entry.key:
                self._problems.append(f"{where}: differs from {other!r} in case alone, expected other names")
            value = entry.value
            if value.kind == "value" and isinstance(value.value, str) and value.value:
                models[entry.key] = (value.value, {})
                continue
            sources = [e for e in value.entries if e.key == "model"]
            texts = [e.value.value for e in sources if isinstance(e.value.value, str) and e.value.value]
            if len(texts) != 1 or len(sources) != 1:
                told = (
                    "" if value.kind == "mapping" else f"{shown(value.value)} is of type {value.type_name}, "
                )
                self._problems.append(
                    f"{where}: {told}expected a directory, a .gguf file or a hub id, or a mapping with one "
                    "`model`"
                )
            if value.kind == "mapping":
                models[entry.key] = (texts[0] if texts else "", self._options(value, ("model",), True))
        return models

    def _targets(self, node: Node | None) -> dict[str, dict[str, Any]]:
        if node is not None and node.kind == "list":
            texts: list[tuple[str, int, dict[str, Any]]] = [
                (str(item.value), item.line, {}) for item in node.items
            ]
            for place, (name, line, _) in enumerate(texts):
                if name in [earlier for earlier, _, _ in texts[:place]]:
                    self._problems.append(f"{self._where(line, name)}: given twice")
        else:
            found = self._named(node, "targets", "a list, or a mapping to options")
            texts = [(e.key, e.line, self._options(e.value, ())) for e in found]
        targets = {}
        for name, line, options in texts:
            if complaint := _target_problem(name):
                self._problems.append(f"{self._where(line, name)}: {complaint}")
            else:
                targets[name] = options
        return targets

    def _entries(self, node: Node | None, what: str) -> list[Node]:
        """The mappings in a list."""
        if node is None or node.value is None:
            return []
        if node.kind != "list":
            self._problems.append(
                f"{self._where(node.line)}: {what} is of type {node.type_name}, expected a list"
            )
            return []
        bad = [item for item in node.items if item.kind != "mapping"]
        self._problems += [
            f"{self._where(item.line)}: {shown(item.value)} is of type {item.type_name}, expected a mapping "
            "with `model` and `target`"
            for item in bad
        ]
        return [item for item in node.items if item.kind == "mapping"]

    def _pick(self, item: Node, key: str, known: Iterable[str], what: str) -> str | None:
        """The model or target an entry names; None when it names none."""
        known = tuple(known)
        values = [(e.line, e.value.value) for e in item.entries if e.key == key]
        if not values:
            return None
        line, value = values[0]
        if len(values) > 1:
            self._problems.append(f"{self._where(line, key)}: given twice")
        if value not in known:
            self._problems.append(
                f"{self._where(line, key)}: {shown(value)} is none of the {what}{_nearest(str(value), known)}"
            )
        return str(value)

    def _exclude(
        self,
        node: Node | None,
        models: Mapping[str, Any],
        targets: Mapping[str, Any],
        pairs: dict[tuple[str, str], dict[str, Any]],
    ) -> None:
        for item in self._entries(node, "exclude"):
            for entry in item.entries:
                if entry.key not in {"model", "target"}:
                    near = _nearest(entry.key, ("model", "target"))
                    self._problems.append(f"{self._where(entry.line, entry.key)}: unknown key{near}")
            model = self._pick(item, "model", models, "models")
            target = self._pick(item, "target", targets, "targets")
            out = [p for p in pairs if model in {None, p[0]} and target in {None, p[1]}]
            if model is None and target is None:
                self._problems.append(
                    f"{self._where(item.line)}: excludes everything, expected a model or target"
                )
            elif not out and model in {None, *models} and target in {None, *targets}:
                self._problems.append(f"{self._where(item.line)}: excludes what is not there (any more)")
            for pair in out:
                del pairs[pair]

    def _include(
        self,
        node: Node | None,
        models: Mapping[str, tuple[str, dict[str, Any]]],
        of_target: Callable[[str], dict[str, Any]],
        named: dict[tuple[str, str], tuple[str, dict[str, Any]]],
    ) -> None:
        """Lay options over engines that are there; add those that are not.

        `of_target`: the options of a target, those for every engine included.
        """
        given: dict[tuple[str, str], Node] = {}
        for item in self._entries(node, "include"):
            own = self._options(item, ("model", "target", "name"))
            model = self._pick(item, "model", models, "models")
            texts = [(e.line, e.value.value) for e in item.entries if e.key == "target"]
            line, target = texts[0] if texts else (item.line, None)
            if model is None or target is None:
                self._problems.append(f"{self._where(item.line)}: expected a `model` and a `target`")
                continue
            if complaint := _target_problem(str(target)):
                self._problems.append(f"{self._where(line, 'target')}: {shown(target)} {complaint}")
                continue
            if model not in models:
                continue
            names = [(e.line, e.value.value) for e in item.entries if e.key == "name"]
            line, name = names[0] if names else (item.line, engine_name(target))
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                self._problems.append(
                    f"{self._where(line, 'name')}: {shown(name)} is no name of a file, expected letters, "
                    "digits and . _ + -, none of . + - in front"
                )
                continue
            place = (model, name)
            before = given.setdefault(place, item)
            if before is not item:
                self._problems.append(
                    f"{self._where(item.line)}: {model}/{name} is given in line {before.line} already"
                )
            elif place in named and (names or named[place][0] != target):
                self._problems.append(
                    f"{self._where(line, 'name')}: {model}/{name} is there already, for {named[place][0]}"
                )
            elif place in named:
                named[place] = (target, {**named[place][1], **own})
            else:
                named[place] = (target, {**of_target(target), **models[model][1], **own})

    def _spec(self, model: str, name: str, source: str, given: Mapping[str, Any]) -> EngineSpec | None:
        """The engine, or None and what is wrong with its options."""
        try:
            options = BuildOptions(**{"weights": "shared", **given})
        except TapeoutError as error:
            self._problems += [f"{self._path}: {model}/{name}: {t}" for t in error.message.splitlines()]
            return None
        return EngineSpec(model, name, source, options)


def engine_name(target: str) -> str:
    """What the engine of a target is called: `cpu`, `h200`, `sm_90`."""
    return target.removeprefix("cuda:")


def _target_problem(target: str) -> str | None:
    """Why a target cannot stand in a matrix."""
    if target == "auto":
        return "depends on the machine, expected cpu, cuda:sm_NN or cuda:SKU"
    check = FIELDS["target"].metadata["check"]
    if complaint := check(target):
        return f"is no target, {str(complaint).replace('auto, ', '')}"
    try:
        BuildOptions(target=target)
    except TapeoutError as error:
        return error.message
    return None


def _nearest(key: str, known: Iterable[str]) -> str:
    names = {name.replace("_", "-"): name for name in known}
    found = difflib.get_close_matches(key.replace("_", "-").removeprefix("no-"), names, n=1, cutoff=0.5)
    return f", did you mean {found[0]}?" if found else f", expected one of {', '.join(names)}"
