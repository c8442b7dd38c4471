"""Plain columns, as kubectl prints them, so that grep and awk can read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep_gang.contract import printable_line


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """One line a row, each column as wide as its longest cell; all rows have as many cells. Nothing in them acts on a terminal."""
    rows = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
