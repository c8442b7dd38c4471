"""Durations, sizes, counts and lists as every part of Lockstep shows them to people."""

from __future__ import annotations

from collections.abc import Sequence

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def duration(seconds: float) -> str:
    """Two units at most, as kubectl shows ages: `45s`, `3m10s`, `1h5m`, `4d3h`. Fractions of a second are cut off."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    parts = ((days, "d"), (hour, "h")) if days else ((hours, "h"), (minute, "m")) if hours else ((minute, "m"), (second, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def step_duration(seconds: float) -> str:
    """Three digits for what is shorter than 100 seconds, such as a training step: `340ms`, `13.1s`; else as `duration` shows it."""
    return f"{seconds * 1000:.3g}ms" if seconds < 1 else f"{seconds:.3g}s" if seconds < 100 else duration(seconds)


def decimal_size(size_bytes: float) -> str:
    """Decimal units, for files, transfers and a device's memory, which are sold by them: `1.5 GB`, `23.7 MB`, `512 B`."""
    return _in_units(size_bytes, _DECIMAL)


def binary_size(size_bytes: float) -> str:
    """Binary units, for what Kubernetes limits (`64Gi`) and for powers of two: `1.5 GiB`, `512 MiB`."""
    return _in_units(size_bytes, _BINARY).replace(".0 ", " ")


def number_of(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`: for nouns whose plural ends in -s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first `most` items, and how many more there are: `a, b and 3 more`; between sentences (`separator="; "`) `a; b; and 3 more`."""
    shown = separator.join(str(item) for item in items[:most])
    return shown + (f"{separator.rstrip(', ')} and {len(items) - most} more" if len(items) > most else "")


def named(noun: str, names: Sequence[object], most: int) -> str:
    """`node a`, or `nodes a, b and 3 more`."""
    return f"{noun}{'' if len(names) == 1 else 's'} {listed(names, most)}"


def _in_units(count: float, units: Sequence[tuple[str, float]]) -> str:
    return next((f"{count / factor:.1f} {unit}" for unit, factor in units if count >= factor), f"{count:.0f} B")
