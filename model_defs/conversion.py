"""Checkpoints in their authors' own layout as recipes for the parameters of Hugging Face's modules.

transformers renames and merges tensors while it loads many families (the experts of a layer, once a
tensor each, become one). Its tables say how; here they are turned into recipes, so that the checkpoint is
read as it is and nothing is written twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tapeout.model_defs.source import TensorInfo
from tapeout.model_defs.weights import WeightRef
from tapeout.plugins.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn


def converted(
    model: nn.Module, tensors: Mapping[str, TensorInfo], expected: Collection[str]
) -> dict[str, WeightRef]:
    """Recipes for the parameters that transformers makes from differently named or shaped tensors.

    Args:
        model: HF's model on the meta device.
        tensors: the checkpoint's, by name.
        expected: names of the model's parameters and buffers; tensors of these names are taken as they are.

    Returns:
        Recipe by parameter name; empty for checkpoints in transformers' own layout.

    Raises:
        UnsupportedError: a conversion that is no stacking, joining or transposition, with its tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    left = sorted((name for name in tensors if name not in expected), key=dot_natural_key)
    if not left:
        return {}
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in left:
        target, pattern = rename_source_key(name, renamings, converters)
        if target in expected and target != name:
            groups[target][pattern or ""].append(name)
    recipes = {}
    for target, sources in groups.items():
        first = next(iter(sources))
        operations: Sequence[Any] = by_pattern[first].operations if first else ()
        patterns = by_pattern[first].source_patterns if first else [""]
        lists = [[WeightRef.of(tensors[n]) for n in sources[p]] for p in patterns if p in sources]
        recipes[target] = _run(target, operations, lists)
    return recipes


def _run(target: str, operations: Sequence[Any], lists: list[list[WeightRef]]) -> WeightRef:
    """The operations of one converter, over one list of tensors for each of its patterns."""
    for operation in operations:
        rule = _OPERATIONS.get(type(operation).__name__)
        if rule is None:
            raise UnsupportedError(
                f"transformers makes {target} with {type(operation).__name__}, which is not supported",
                hint="save the model once with transformers 5 in its own layout: save_pretrained(DIR, "
                "save_original_format=False)",
            )
        lists = rule(operation, lists)
    if len(lists) != 1 or len(lists[0]) != 1:
        names = ", ".join(ref.text() for refs in lists for ref in refs[:2])
        raise UnsupportedError(f"{target}: transformers' table leaves several tensors of one: {names}, ...")
    return lists[0][0]


def _merge(operation: Any, lists: list[list[WeightRef]]) -> list[list[WeightRef]]:
    return [[WeightRef.stack(refs, operation.dim)] for refs in lists]


def _concatenate(operation: Any, lists: list[list[WeightRef]]) -> list[list[WeightRef]]:
    return [[WeightRef.concat([ref for refs in lists for ref in refs], operation.dim)]]


def _transpose(operation: Any, lists: list[list[WeightRef]]) -> list[list[WeightRef]]:
    for refs in lists:
        for ref in refs:
            rank = len(ref.shape)
            if {operation.dim0 % rank, operation.dim1 % rank} != {rank - 2, rank - 1} or operation.check_dims:
                raise UnsupportedError(f"{ref.text()}: transposition of {operation.dim0}, {operation.dim1}")
    return [[ref.transpose() for ref in refs] for refs in lists]


_Rule = Callable[[Any, list[list[WeightRef]]], list[list[WeightRef]]]
_OPERATIONS: Mapping[str, _Rule] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Transpose": _transpose,
}
