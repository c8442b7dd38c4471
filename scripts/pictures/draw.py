"""Draw a terminal's screens as SVG: one as a picture, many as a film that runs by itself, also where SVG is shown as an image.

Nothing in it is fetched: no font, no script. Every run of equal letters has its place and width, so that columns stand straight in any
font. Where films aren't shown, or the reader wants no motion, the last screen of a film is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby

import pyte
from pyte.screens import Char

WIDTH, HEIGHT, SIZE = 8.4, 18, 14
"""Pixels of a letter's cell, and of the font."""
MARGIN, BAR = 14, 30
INK, PAPER, FRAME = "#d8dee9", "#1d2129", "#343b48"
COLORS = {
    "black": "#3b4252", "red": "#ef6b73", "green": "#8fce7a", "brown": "#ebcb8b", "blue": "#81a9f0", "magenta": "#c792ea",
    "cyan": "#7fd1cf", "white": "#e5e9f0",
    "brightblack": "#7f8896", "brightred": "#ff8a90", "brightgreen": "#a9e49a", "brightbrown": "#ffdf9e", "brightblue": "#9dbfff",
    "brightmagenta": "#dcb1ff", "brightcyan": "#a0e8e6", "brightwhite": "#ffffff",
}  # fmt: skip
"""pyte's names: brown is what others call yellow."""


@dataclass(frozen=True)
class Frame:
    seconds: float
    """Time for which it is shown."""
    lines: tuple[str, ...]
    """Every line of the screen, drawn."""


def frame(screen: pyte.Screen, seconds: float = 0) -> Frame:
    """Return the screen as it is now."""
    return Frame(seconds, tuple(_line([screen.buffer[row][column] for column in range(screen.columns)]) for row in range(screen.lines)))


def picture(title: str, frames: Iterable[Frame], columns: int) -> str:
    """SVG of the frames; of one, without any motion. Rows that no frame uses at the end are left out."""
    shown = list(frames)
    rows = max(row + 1 for each in shown for row, line in enumerate(each.lines) if line)
    width, height = columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN + BAR
    lines = {line: f"l{number}" for number, line in enumerate(dict.fromkeys(line for each in shown for line in each.lines if line))}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        (
            f"<style>text{{font:{SIZE}px ui-monospace,Menlo,Consolas,'DejaVu Sans"
            f" Mono',monospace;fill:{INK};white-space:pre}}.b{{font-weight:bold}}"
        ),
        *_motion(shown),
        "</style>",
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="{PAPER}" stroke="{FRAME}"/>',
        f'<text x="{width / 2:.0f}" y="20" text-anchor="middle" style="fill:{COLORS["brightblack"]}">{escape(title)}</text>',
        "<defs>",
        *(f'<g id="{name}">{line}</g>' for line, name in lines.items()),
        "</defs>",
        f'<g transform="translate({MARGIN} {MARGIN + BAR})">',
        *_frames(shown, lines),
        "</g>",
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _frames(frames: list[Frame], names: dict[str, str]) -> Iterator[str]:
    for number, each in enumerate(frames):
        hidden = "" if each is frames[-1] else ' visibility="hidden"'
        moves = f' id="f{number}"' if len(frames) > 1 else ""
        used = "".join(f'<use href="#{names[line]}" y="{row * HEIGHT}"/>' for row, line in enumerate(each.lines) if line)
        yield f"<g{moves}{hidden}>{used}</g>"


def _motion(frames: list[Frame]) -> Iterator[str]:
    if len(frames) < 2:
        return
    total = sum(each.seconds for each in frames)
    yield "@media (prefers-reduced-motion:no-preference){"
    begin = 0.0
    for number, each in enumerate(frames):
        first, last = begin / total * 100, (begin + each.seconds) / total * 100
        before = "0%{visibility:hidden}" if number else ""
        after = f"{last:.3f}%{{visibility:hidden}}" if each is not frames[-1] else ""
        yield (
            f"@keyframes k{number}{{{before}{first:.3f}%{{visibility:visible}}{after}}}#f{number}{{animation:k{number} {total:.1f}s"
            " step-end infinite}"
        )
        begin += each.seconds
    yield "}"


def _line(cells: list[Char]) -> str:
    """A line without its place: its backgrounds, then its letters."""
    grounds, letters = [], []
    column = 0
    for look, group in groupby(cells, key=_look):
        text = "".join(cell.data for cell in group)
        ink, paper, is_bold = look
        if paper != PAPER:
            grounds.append(f'<rect x="{column * WIDTH:.1f}" y="-{SIZE}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}" fill="{paper}"/>')
        for start, word in _words(text):
            fill = f' style="fill:{ink}"' if ink != INK else ""
            bold = ' class="b"' if is_bold else ""
            letters.append(
                f'<text x="{(column + start) * WIDTH:.1f}" textLength="{len(word) * WIDTH:.1f}"{bold}{fill}>{escape(word)}</text>'
            )
        column += len(text)
    return "".join(grounds + letters)


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Yield each part between two or more blanks, with its column. So a renderer that drops blanks, or uses another font, can't move it."""
    start = 0
    for part in text.split("  "):
        word = part.strip()
        if word:
            yield start + len(part) - len(part.lstrip()), word
        start += len(part) + 2


def _look(cell: Char) -> tuple[str, str, bool]:
    ink, paper = _color(cell.fg, INK), _color(cell.bg, PAPER)
    return (paper, ink, cell.bold) if cell.reverse else (ink, paper, cell.bold)


def _color(name: str, default: str) -> str:
    if name == "default":
        return default
    return COLORS.get(name) or f"#{name}"
