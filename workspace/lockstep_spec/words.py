"""Words as every part of Lockstep shows them to people: durations, sizes, counts and lists, and texts that somebody else wrote, made
printable.

Control characters would let a script clear the screen, change a window's title or write over what stands there, those that change the
direction of writing would show a name as another one, and those that nothing shows would let two names look the same. All become escapes,
which nothing acts on and everybody sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_DECIMAL = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def any_of(*patterns: str, flags: int = 0) -> re.Pattern[str]:
    """Return the pattern that matches wherever one of `patterns` does, the first of them before the others."""
    return re.compile("|".join(patterns), flags)


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


LISTED = 8


def listed(items: Sequence[object]) -> str:
    """The first eight items, and how many more there are: `a, b and 3 more`."""
    return ", ".join(map(str, items[:LISTED])) + (f" and {len(items) - LISTED} more" if len(items) > LISTED else "")


CLAUSES = 3


def clauses(texts: Sequence[object]) -> str:
    """The first three texts, and how many more there are: `a; b; c; and 3 more`."""
    return "; ".join(map(str, texts[:CLAUSES])) + (f"; and {len(texts) - CLAUSES} more" if len(texts) > CLAUSES else "")


def named(noun: str, names: Sequence[object]) -> str:
    """`node a`, or `nodes a, b and 3 more`."""
    return f"{noun}{'' if len(names) == 1 else 's'} {listed(names)}"


def _in_units(count: float, units: Sequence[tuple[str, float]]) -> str:
    return next((f"{count / factor:.1f} {unit}" for unit, factor in units if count >= factor), f"{count:.0f} B")


_UNPRINTABLE = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]"
)
"""C0 without tab and newline, DEL, C1; marks, embeddings, overrides and isolates of direction; line and paragraph separators; halves of
pairs, which can't be encoded. And what nothing shows (Default_Ignorable_Code_Point of https://www.unicode.org/reports/tr44/, and
annotations), but joiners and variation selectors: words of many languages and emoji need those. It is compiled when it is first used: most
verbs never do.
"""


def printable(text: str) -> str:
    """`text` with escapes (``\\x1b``, ``\\u202e``) for what a terminal would act on. Tabs and line ends stay."""
    return re.sub(_UNPRINTABLE, _escape, text)


def printable_line(text: str) -> str:
    """The same as one line, so that no text can look like a line of somebody else's: line ends become ` | `."""
    if text.isascii() and text.isprintable():  # (most is: a report of a thousand nodes has six thousand texts)
        return text
    lines = text.splitlines()
    if len(lines) < 2 and (not lines or lines[0] == text):
        return printable(text)
    return " | ".join(printable(line.strip()) for line in lines if line.strip())


def cleaned(value: object) -> object:
    """Parsed JSON with every text in it, keys too, as `printable_line` gives it."""
    if isinstance(value, str):
        return printable_line(value)
    if isinstance(value, dict):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def json_escaped(text: str) -> str:
    """JSON that parses to the same, without a character that a terminal would act on: such stand only within its strings."""
    return re.sub(_UNPRINTABLE, lambda match: json.dumps(match[0])[1:-1] if match[0] > "\x7f" else f"\\u{ord(match[0]):04x}", text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
