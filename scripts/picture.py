"""Make a picture of what a command printed: script -qec "lockstep get" /dev/null | python scripts/picture.py "lockstep get" docs/pictures/get.svg

The text is as it was printed, colors included; only the frame is added. It reads standard input to its end.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The font that Rich's pictures would fetch from a network."""
TERMINAL_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhln-su]|\x1b[=>]|\r")
"""Cursor movements and modes: everything except the colors."""


def picture(title: str, printed: str, width: int) -> str:
    """An SVG that shows the text in a terminal of `width` columns."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(TERMINAL_CONTROL.sub("", printed).rstrip()), soft_wrap=False, crop=True, highlight=False)
    drawn = FONT_FACE.sub("", console.export_svg(title=title, theme=MONOKAI, unique_id="t"))
    drawn = drawn.replace("Fira Code, monospace", "monospace").replace('"Fira Code"', "monospace")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("title")
    parser.add_argument("target", type=Path)
    parser.add_argument("--width", type=int, default=120)
    asked = parser.parse_args()
    asked.target.parent.mkdir(parents=True, exist_ok=True)
    asked.target.write_text(picture(asked.title, sys.stdin.read(), asked.width), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
