"""How each tensor of a model lies in its weight files, by transformers' own rules of renaming and fusing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_train.model.pieces import Layout, concatenate, stack, stored
from lockstep_train.model.weight_files import DTYPES, StoredTensor


class Unfitting(Exception):
    """This model can't be read slice by slice: why."""


@dataclass
class _Target:
    """What is collected for one tensor of the model."""

    converter: Any = None
    sources: dict[str, list[Layout]] = field(default_factory=lambda: defaultdict(list))


def model_layouts(model: Any, weight_mapping: list[Any], tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, Layout], set[str]]:
    """Layout of every tensor of the model that the files hold, and the names in the files that the model has no place for.

    `model` is a transformers model, `weight_mapping` its conversions. Raises Unfitting for a conversion that is more than
    renaming, stacking and concatenating, and for a number format that torch can't read here.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    places = model.state_dict()
    targets: dict[str, _Target] = defaultdict(_Target)
    unexpected: set[str] = set()
    for name in sorted(tensors, key=dot_natural_key):  # the order in which experts are stacked
        target, pattern = _rename(name, renamings, converters, model.base_model_prefix, places)
        if target not in places:
            unexpected.add(target)
            continue
        if tensors[name].dtype not in DTYPES:
            raise Unfitting(f"{name} is stored as {tensors[name].dtype}")
        targets[target].sources[pattern or name].append(stored(name, tensors[name].shape))
        if pattern is not None:
            targets[target].converter = by_pattern[pattern]
    return {name: _converted(name, target) for name, target in targets.items()}, unexpected


def _rename(name: str, renamings: list[Any], converters: list[Any], prefix: str, places: Mapping[str, Any]) -> tuple[str, str | None]:
    """The model's name for a stored tensor, and the pattern of the converter it goes through."""
    from transformers.core_model_loading import rename_source_key

    renamed, pattern = rename_source_key(name, renamings, converters, prefix, places)
    if renamed not in places and name in places:
        renamed, pattern = rename_source_key(name, [], [], prefix, places)
    return renamed, pattern


def _converted(name: str, target: _Target) -> Layout:
    if target.converter is None:
        (layouts,) = target.sources.values()
        return layouts[0]
    converter = target.converter
    if len(converter.target_patterns) != 1:
        raise Unfitting(f"{name} is one of several tensors that one stored tensor is split into")
    current: dict[str, list[Layout]] = dict(target.sources)
    try:
        for operation in converter.operations:
            current = _apply(operation, current, converter.source_patterns)
    except ValueError as error:
        raise Unfitting(f"{name}: {error}") from error
    (result,) = current.values()
    if len(result) != 1:
        raise Unfitting(f"{name}: its conversion leaves {len(result)} tensors")
    return result[0]


def _apply(operation: Any, current: dict[str, list[Layout]], order: list[str]) -> dict[str, list[Layout]]:
    """One conversion of transformers, on layouts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if type(operation) is MergeModulelist and operation.dim == 0:
        return {pattern: [stack(layouts)] for pattern, layouts in current.items()}
    if type(operation) is Concatenate:
        layouts = [layout for pattern in order for layout in current.get(pattern, [])]
        return {"": [concatenate(layouts, operation.dim)]}
    raise Unfitting(f"transformers converts a tensor by {operation!r}")
