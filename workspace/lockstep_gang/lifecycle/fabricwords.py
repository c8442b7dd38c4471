"""Numbers and names of the fabric as people write them (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_SHOWN = 12


def number_runs(numbers: Iterable[int]) -> str:
    """0–3, 6"""
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in _runs(sorted(set(numbers))))


def ranks_words(ranks: Iterable[int]) -> str:
    """rank 4, or ranks 4–7"""
    given = list(ranks)
    return f"rank{'s' if len(given) > 1 else ''} {number_runs(given)}"


def names_words(names: Iterable[str]) -> str:
    """mlx5_0..3, mlx5_6: three and more that follow each other are one."""
    given = list(dict.fromkeys(names))
    numbered = {name: (m[1], int(m[2])) for name in given if (m := _NUMBERED.match(name))}
    words: list[str] = [name for name in given if name not in numbered]
    for prefix in dict.fromkeys(prefix for prefix, _ in numbered.values()):
        for first, last in _runs(sorted(number for p, number in numbered.values() if p == prefix)):
            words += [f"{prefix}{first}..{last}"] if last - first >= 2 else [f"{prefix}{n}" for n in range(first, last + 1)]
    more = len(words) - _SHOWN
    return ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    start = previous = None
    for number in numbers:
        if start is None or previous is None or number != previous + 1:
            if start is not None and previous is not None:
                yield start, previous
            start = number
        previous = number
    if start is not None and previous is not None:
        yield start, previous


def speed_words(mbps: int) -> str:
    return f"{mbps // 1000} Gb/s" if mbps % 1000 == 0 else f"{mbps} Mb/s"
