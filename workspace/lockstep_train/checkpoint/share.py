"""Cutting elements into equal shares (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def even_share(numbers: Sequence[int], rank: int, world_size: int) -> Iterator[tuple[int, int, int]]:
    """This rank's part of tensors of `numbers` elements: (index of the tensor, first element, how many).

    All elements in one row, cut into `world_size` ranges that differ by at most one.
    """
    total = sum(numbers)
    begin, end = total * rank // world_size, total * (rank + 1) // world_size
    offset = 0
    for index, number in enumerate(numbers):
        first, last = max(begin, offset), min(end, offset + number)
        if first < last:
            yield index, first - offset, last - first
        offset += number
