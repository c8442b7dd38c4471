"""Which ranges of stored tensors make up a model's parameter (pure).

transformers fuses and renames weights while it loads them (one tensor an expert in the file, one for all experts in the
model). Here the same operations are applied to layouts instead of values, so that any range of the result is known by
the ranges of the file it comes from.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of the stored tensor `name`, flattened."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Layout:
    """A tensor of `shape`, whose elements in row-major order are those of `pieces`, one after the other."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(piece.numel for piece in self.pieces))

    def cut(self, start: int, numel: int) -> list[Piece]:
        """The pieces of elements [start, start + numel)."""
        found: list[Piece] = []
        index = bisect_right(self._ends, start)
        while numel > 0:
            piece = self.pieces[index]
            skipped = start - (self._ends[index] - piece.numel)
            taken = min(numel, piece.numel - skipped)
            found.append(Piece(piece.name, piece.start + skipped, taken))
            start, numel, index = start + taken, numel - taken, index + 1
        return found


def stored(name: str, shape: tuple[int, ...]) -> Layout:
    return Layout(shape, (Piece(name, 0, math.prod(shape)),))


def stack(layouts: Sequence[Layout]) -> Layout:
    """torch.stack along dimension 0. Raises ValueError for unequal shapes."""
    shapes = {layout.shape for layout in layouts}
    if len(shapes) != 1:
        raise ValueError(f"tensors of the shapes {sorted(shapes)} can't be stacked")
    return Layout((len(layouts), *shapes.pop()), tuple(piece for layout in layouts for piece in layout.pieces))


def concatenate(layouts: Sequence[Layout], dimension: int) -> Layout:
    """torch.cat. Raises ValueError for shapes that differ elsewhere than in `dimension`."""
    around = {layout.shape[:dimension] + layout.shape[dimension + 1 :] for layout in layouts}
    if len(around) != 1:
        raise ValueError(f"tensors of the shapes {[layout.shape for layout in layouts]} can't be joined along dimension {dimension}")
    first = layouts[0].shape
    shape = (*first[:dimension], sum(layout.shape[dimension] for layout in layouts), *first[dimension + 1 :])
    blocks = math.prod(first[:dimension])
    pieces: list[Piece] = []
    for block in range(blocks):
        for layout in layouts:
            size = math.prod(layout.shape[dimension:])
            pieces.extend(layout.cut(block * size, size))
    return Layout(shape, tuple(pieces))
