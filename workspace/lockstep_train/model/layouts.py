"""Layouts: which ranges of stored tensors make up each tensor of a model, by transformers' own rules of renaming and fusing.

transformers fuses and renames weights while it loads them (one tensor an expert in the file, one for all experts in the
model). Here the same operations are applied to layouts instead of values, so that any range of the result is known by
the ranges of the file it comes from.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from lockstep_train.model.stored import StoredTensor
from lockstep_train.model.weight_files import DTYPES


@dataclass(frozen=True)
class StoredPiece:
    """Elements [start, start + numel) of the stored tensor `name`, flattened."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of `shape`, whose elements in row-major order are those of `pieces`, one after the other."""

    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(piece.numel for piece in self.pieces))

    def cut(self, start: int, numel: int) -> list[StoredPiece]:
        """The pieces of elements [start, start + numel)."""
        pieces: list[StoredPiece] = []
        index = bisect_right(self._ends, start)
        while numel > 0:
            piece = self.pieces[index]
            skipped = start - (self._ends[index] - piece.numel)
            taken = min(numel, piece.numel - skipped)
            pieces.append(StoredPiece(piece.name, piece.start + skipped, taken))
            start, numel, index = start + taken, numel - taken, index + 1
        return pieces


def stored_layout(name: str, shape: tuple[int, ...]) -> TensorLayout:
    return TensorLayout(shape, (StoredPiece(name, 0, math.prod(shape)),))


def stack(layouts: Sequence[TensorLayout]) -> TensorLayout:
    """torch.stack along dimension 0. Raises ValueError for unequal shapes."""
    shapes = {layout.shape for layout in layouts}
    if len(shapes) != 1:
        raise ValueError(f"tensors of the shapes {sorted(shapes)} can't be stacked")
    return TensorLayout((len(layouts), *shapes.pop()), tuple(piece for layout in layouts for piece in layout.pieces))


def concatenate(layouts: Sequence[TensorLayout], dimension: int) -> TensorLayout:
    """torch.cat. Raises ValueError for shapes that differ elsewhere than in `dimension`."""
    around = {layout.shape[:dimension] + layout.shape[dimension + 1 :] for layout in layouts}
    if len(around) != 1:
        raise ValueError(f"tensors of the shapes {[layout.shape for layout in layouts]} can't be joined along dimension {dimension}")
    first = layouts[0].shape
    shape = (*first[:dimension], sum(layout.shape[dimension] for layout in layouts), *first[dimension + 1 :])
    blocks = math.prod(first[:dimension])
    pieces: list[StoredPiece] = []
    for block in range(blocks):
        for layout in layouts:
            size = math.prod(layout.shape[dimension:])
            pieces.extend(layout.cut(block * size, size))
    return TensorLayout(shape, tuple(pieces))


class Unfitting(Exception):
    """Reason why this model can't be read slice by slice."""


@dataclass
class _Target:
    """Parts collected for one tensor of the model."""

    converter: Any = None
    sources: dict[str, list[TensorLayout]] = field(default_factory=lambda: defaultdict(list))


def model_layouts(model: Any, weight_mapping: list[Any], tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, TensorLayout], set[str]]:
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
        targets[target].sources[pattern or name].append(stored_layout(name, tensors[name].shape))
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


def _converted(name: str, target: _Target) -> TensorLayout:
    if target.converter is None:
        (layouts,) = target.sources.values()
        return layouts[0]
    converter = target.converter
    if len(converter.target_patterns) != 1:
        raise Unfitting(f"{name} is one of several tensors that one stored tensor is split into")
    current: dict[str, list[TensorLayout]] = dict(target.sources)
    try:
        for operation in converter.operations:
            current = _apply(operation, current, converter.source_patterns)
    except ValueError as error:
        raise Unfitting(f"{name}: {error}") from error
    (result,) = current.values()
    if len(result) != 1:
        raise Unfitting(f"{name}: its conversion leaves {len(result)} tensors")
    return result[0]


def _apply(operation: Any, current: dict[str, list[TensorLayout]], order: list[str]) -> dict[str, list[TensorLayout]]:
    """One conversion of transformers, on layouts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if type(operation) is MergeModulelist and operation.dim == 0:
        return {pattern: [stack(layouts)] for pattern, layouts in current.items()}
    if type(operation) is Concatenate:
        layouts = [layout for pattern in order for layout in current.get(pattern, [])]
        return {"": [concatenate(layouts, operation.dim)]}
    raise Unfitting(f"transformers converts a tensor by {operation!r}")
