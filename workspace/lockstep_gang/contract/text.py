"""Texts that somebody else wrote, made fit for a terminal or a reader of logs: the one definition for node 0's log, statuses, events and the
command line.

Control characters would let a script clear the screen, change a window's title or write over what stands there, those that change the direction
of writing would show a name as another one, and those that nothing shows would let two names look the same. All become escapes, which nothing acts
on and everybody sees.
"""

from __future__ import annotations

import json
import re

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff]"
)
"""C0 without tab and newline, DEL, C1; marks, embeddings, overrides and isolates of direction; line and paragraph separators; halves of pairs, which
can't be encoded. And what nothing shows (Default_Ignorable_Code_Point of https://www.unicode.org/reports/tr44/, and annotations), but joiners and
variation selectors: words of many languages and emoji need those."""


def printable(text: str) -> str:
    """`text` with escapes (``\\x1b``, ``\\u202e``) for what a terminal would act on. Tabs and line ends stay."""
    return _UNPRINTABLE.sub(_escape, text)


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
    return _UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1] if match[0] > "\x7f" else f"\\u{ord(match[0]):04x}", text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
